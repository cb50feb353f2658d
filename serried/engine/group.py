"""The group that an engine's ranks meet in: shared memory for the native backend, gloo or NCCL for torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from serried.config import EngineConfig, TorchrunWorld
from serried.parallel.comm import Communicator

STARTING = 60.0  # seconds that a rank may take to start, however impatient its peers are once they work


def group_of_children(
    config: EngineConfig, fd: int, rank: int, watch: Callable[[], None] = lambda: None
) -> Communicator:
    """The group of a process and its children, which share the memfd `fd`."""
    size, timeout = config.tensor_parallel_size, config.collective_timeout
    joining = max(timeout, STARTING)
    if config.backend == "native":
        from serried.parallel.shm import ShmComm

        return ShmComm(fd, rank, size, timeout, config.allreduce_algorithm, watch=watch, joining=joining)
    from serried.parallel.torch_comm import TorchComm, anonymous_store

    store = anonymous_store(fd, size)
    return TorchComm(store, rank, size, config.device, timeout, loopback=True, watch=watch, joining=joining)


def group_of_world(config: EngineConfig, world: TorchrunWorld) -> Communicator:
    """The group of all ranks of torchrun's world."""
    from serried.parallel.torch_comm import TorchComm, join_torchrun

    store, timeout = join_torchrun(world), config.collective_timeout
    joining = max(timeout, STARTING)
    if config.backend == "native":
        from serried.parallel.fd_share import share_memfd
        from serried.parallel.shm import ShmComm

        shared: Any = store  # its stub says that it stores text; it stores bytes
        fd = share_memfd(shared, world.rank, world.size)
        return ShmComm(fd, world.rank, world.size, timeout, config.allreduce_algorithm, joining=joining)
    return TorchComm(store, world.rank, world.size, config.device, timeout, loopback=world.loopback, joining=joining)
