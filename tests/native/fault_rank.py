"""One rank of a world without a parent: calls one operation for ever, until it or another one meets its fate.

argv: memfd, rank, size, operation, timeout in seconds. Prints "in" when the calls have begun, and in the end the
rank that its error names, the time that the failing call took, and the error.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable

import numpy as np

from serried.errors import RankFailed
from serried.parallel.partition import RowPartition
from serried.parallel.reduction import ReductionTree
from serried.parallel.shm import ShmComm


def operation(comm: ShmComm, name: str) -> Callable[[], object]:
    """One call of an operation on arrays that it may overwrite."""
    x, ones = np.zeros(50_000, np.float32), [1] * comm.size
    if name == "reduce_nodes":
        plan = RowPartition.over(ReductionTree(1024, 64), ones).plan
        nodes = np.zeros((8, plan.counts[comm.rank], 512), np.float32)
        return lambda: comm.reduce_nodes(nodes, plan)
    if name == "subgroup":
        group = comm.subgroup(list(reversed(range(comm.size))))
        return lambda: group.all_reduce(x) if group else None
    if name == "around":
        to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        return lambda: (comm.send(x[:100], to), comm.recv(x[:100], source))
    if name in ("one-shot", "two-shot", "ring"):
        comm.algorithm = name
        return lambda: comm.all_reduce(x)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: comm.all_gather(x[:1], ones),
        "broadcast": lambda: comm.broadcast(x),
        "barrier": comm.barrier,
    }
    return calls[name]


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if whoever runs the tests ignores it
    fd, rank, size = map(int, sys.argv[1:4])
    comm = ShmComm(fd, rank, size, float(sys.argv[5]))
    call = operation(comm, sys.argv[4])
    comm.barrier()
    print("in", flush=True)
    while True:
        begun = time.monotonic()
        try:
            call()
        except RankFailed as error:
            print(error.rank, time.monotonic() - begun, error.reason, flush=True)
            return


if __name__ == "__main__":
    main()
