"""The backends by name, imported when first asked for."""

from __future__ import annotations

import importlib.util

from serried.backends.base import Backend
from serried.errors import InputError

NAMES = ("torch",)


def check_backend(name: str) -> None:
    """Refuse a backend that is unknown or whose library is missing."""
    if name not in NAMES:
        raise InputError(f"--backend {name}: unknown; choose from {', '.join(NAMES)}")
    if importlib.util.find_spec("torch") is None:
        raise InputError("--backend torch: PyTorch is not installed; pip install 'serried[torch]'")


def choose_device(name: str, device: str, ranks: int, local_rank: int = 0) -> str:
    """`cpu` or `cuda` for `auto`, and the current CUDA device set for this rank where it is `cuda`."""
    check_backend(name)
    from serried.backends.torch import choose_torch_device

    return choose_torch_device(device, ranks, local_rank)


def create_backend(name: str, dtype: str, device: str, threads: int) -> Backend:
    """A backend for this rank."""
    check_backend(name)
    from serried.backends.torch import TorchBackend

    return TorchBackend(dtype, device, threads)
