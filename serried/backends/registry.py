"""The backends by name, imported when first asked for."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from serried import _native
from serried.backends.base import Backend
from serried.config import EngineConfig
from serried.errors import InputError
from serried.machine import cores_of_rank
from serried.parallel.comm import Communicator


def resolve_backend(config: EngineConfig, local_rank: int = 0) -> EngineConfig:
    """The config with backend and device decided; InputError where what it asks for is not there.

    auto: native on a CPU where it was built, else torch. On CUDA the rank's device is made the current one.
    """
    if config.backend == "native" or (config.backend == "auto" and config.device != "cuda" and _native.available()):
        return _native_config(config)
    if importlib.util.find_spec("torch") is None:
        raise InputError("--backend torch: PyTorch is not installed; pip install 'serried[torch]'")
    from serried.backends.torch import choose_torch_device

    device = choose_torch_device(config.device, config.tensor_parallel_size, local_rank)
    return config.resolve(backend="torch", device=device)


def _native_config(config: EngineConfig) -> EngineConfig:
    if config.device == "cuda":
        raise InputError("--backend native: runs on a CPU; for --device cuda take --backend torch")
    _native.choose_isa()
    return config.resolve(backend="native", device="cpu")


def create_backend(config: EngineConfig, comm: Communicator) -> Backend:
    """A backend for this rank, of a config that resolve_backend has decided."""
    if config.backend == "torch":
        from serried.backends.torch import TorchBackend

        return TorchBackend(config.dtype, config.device, config.threads)
    from serried.backends.native import NativeBackend

    cpus = cores_of_rank(comm.rank, comm.size, config.threads)
    return NativeBackend(config.dtype, config.threads, comm, config.max_num_batched_tokens, cpus, agreed_isa(comm))


def agreed_isa(comm: Communicator) -> str:
    """The best instruction set that every rank has: results are exact within one set.

    A rank brings the sets that it can run, up to the one that it would choose, as bits.
    """
    isas = _native.runnable_isas()
    up_to_chosen = isas[: isas.index(_native.choose_isa()) + 1]
    mine = sum(1 << _native.ISAS.index(isa) for isa in up_to_chosen)
    sets: Any = comm.all_gather(np.array([mine], np.int32), [1] * comm.size)
    common = int(np.bitwise_and.reduce(sets))
    return _native.ISAS[common.bit_length() - 1]
