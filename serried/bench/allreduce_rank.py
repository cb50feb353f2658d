"""`python -m serried.bench.allreduce_rank`: one rank of `serried bench allreduce`."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np

from serried.bench.allreduce import TIMEOUT, Task
from serried.parallel.link import ChildLink


def main() -> None:
    """Join the group, then do what rank 0's parent asks for, until it hangs up."""
    with ChildLink.from_argv() as link:
        comm = _group(msgspec.msgpack.decode(link.payload, type=str), link)
        link.ready()
        while True:
            task = msgspec.msgpack.decode(link.recv(), type=Task)
            seconds = _measure(comm, task)
            if link.rank == 0:
                link.send(msgspec.msgpack.encode(seconds))


def _group(kind: str, link: ChildLink) -> Any:
    if kind == "gloo":
        from serried.parallel.torch_comm import TorchComm, anonymous_store

        return TorchComm(
            anonymous_store(link.store_fd, link.size), link.rank, link.size, timeout=TIMEOUT, loopback=True
        )
    from serried.parallel.shm import ShmComm

    return ShmComm(link.store_fd, link.rank, link.size, TIMEOUT)


def _measure(comm: Any, task: Task) -> float:
    """Seconds of one call: the median of several batches of calls."""
    x = np.ones(task.bytes // 4, np.float32)
    call = _bare(comm, x, task) or (lambda: comm.all_reduce(x))
    batch = max(1, task.calls // 5)
    seconds = []
    comm.barrier()
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(batch):
            call()
        seconds.append((time.perf_counter() - start) / batch)
        x[:] = 1.0
    return sorted(seconds)[2]


def _bare(comm: Any, x: Any, task: Task) -> Any:
    """The C++ call itself, as a step of the program makes it, without Python's book-keeping around it."""
    native = getattr(comm, "native", None)
    if native is None:
        return None
    from serried.parallel.select import ALGORITHMS

    address, algorithm = x.ctypes.data, ALGORITHMS.index(task.algorithm)
    return lambda: native.all_reduce(address, x.size, 0, algorithm)


if __name__ == "__main__":
    main()
