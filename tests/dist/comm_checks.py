"""What every rank of a world does and finds, for each operation; each compares with NumPy by itself."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.distributed.distributed_c10d import PrefixStore

from serried.errors import RankFailed
from serried.parallel.comm import Communicator, LocalComm
from serried.parallel.partition import RowPartition
from serried.parallel.reduction import ReductionTree
from serried.parallel.torch_comm import TorchComm

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16, np.int8, np.int32, np.int64)


def values(rank: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Small integers: their sums are exact in every dtype, so any order of addition gives the same."""
    return np.random.default_rng(rank).integers(-6, 7, shape).astype(dtype)


def to_torch(x: np.ndarray) -> torch.Tensor:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def same(got: Any, expected: np.ndarray) -> None:
    """The same bits, shape and dtype."""
    array = to_numpy(got) if isinstance(got, torch.Tensor) else got
    assert array.dtype == expected.dtype
    assert array.shape == expected.shape
    assert array.tobytes() == np.ascontiguousarray(expected).tobytes()


def kinds(
    dtypes: tuple[Any, ...] = DTYPES,
) -> Iterator[tuple[Any, Callable[[np.ndarray], Any]]]:
    """Every dtype, as a NumPy array and as a tensor."""
    for dtype in dtypes:
        yield dtype, np.copy
        yield dtype, lambda x: to_torch(x.copy())


def uneven(size: int) -> list[list[int]]:
    """Parts that do not divide, with empty ones, and equal ones."""
    return [[(3 * r + 1) % 4 for r in range(size)], [0] * (size - 1) + [5], [2] * size, [0] * size]


def all_reduce(comm: Communicator) -> None:
    for dtype, kind in kinds():
        for shape in ((), (7,), (3, 5), (0, 4), (40_000,)):
            parts = [values(r, shape, dtype) for r in range(comm.size)]
            same(comm.all_reduce(kind(parts[comm.rank])), np.asarray(sum(parts[1:], parts[0]), dtype))


def reduce_scatter(comm: Communicator) -> None:
    for dtype, kind in kinds():
        for parts in uneven(comm.size):
            inputs = [values(r, (sum(parts), 3), dtype) for r in range(comm.size)]
            start = sum(parts[: comm.rank])
            expected = sum(inputs[1:], inputs[0])[start : start + parts[comm.rank]]
            same(comm.reduce_scatter(kind(inputs[comm.rank]), parts), expected)
    with pytest.raises(ValueError, match="rows"):
        comm.reduce_scatter(np.zeros((1, 3), np.float32), [7] * comm.size)


def all_gather(comm: Communicator) -> None:
    for dtype, kind in kinds():
        for parts in uneven(comm.size):
            for dim in (0, 1, -1):
                inputs = [values(r, part_shape(parts[r], dim), dtype) for r in range(comm.size)]
                got = comm.all_gather(kind(inputs[comm.rank]), parts, dim)
                same(got, np.concatenate(inputs, dim))
    with pytest.raises(ValueError, match="part"):
        comm.all_gather(np.zeros(3, np.float32), [7] * comm.size)


def gather(comm: Communicator) -> None:
    for root in {0, comm.size - 1}:
        for dtype, kind in kinds((np.float32, ml_dtypes.bfloat16, np.int64)):
            for parts in uneven(comm.size):
                for dim in (0, 2):
                    inputs = [values(r, part_shape(parts[r], dim), dtype) for r in range(comm.size)]
                    got = comm.gather(kind(inputs[comm.rank]), parts, dim, root)
                    if comm.rank == root:
                        same(got, np.concatenate(inputs, dim))
                    else:
                        assert got is None


def part_shape(part: int, dim: int) -> tuple[int, ...]:
    shape = [2, 3, 4]
    shape[dim] = part
    return tuple(shape)


def broadcast(comm: Communicator) -> None:
    for root in range(comm.size):
        for dtype, kind in kinds():
            same(comm.broadcast(kind(values(comm.rank, (4, 3), dtype)), root), values(root, (4, 3), dtype))
    frozen = values(comm.rank, (4,), np.float32)
    frozen.flags.writeable = False
    same(comm.broadcast(frozen, 0), values(0, (4,), np.float32))
    same(frozen, values(comm.rank, (4,), np.float32))


def send_recv(comm: Communicator) -> None:
    """Once around, then each to each other in the order of their ranks."""
    for dtype, kind in kinds():
        for shape in ((5,), (0,)):
            to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            here, there = values(comm.rank, shape, dtype), values(source, shape, dtype)
            if comm.rank % 2:
                same(comm.recv(kind(np.zeros_like(here)), source), there)
            comm.send(kind(here), to)
            if comm.rank % 2 == 0:
                same(comm.recv(kind(np.zeros_like(here)), source), there)


def reduce_nodes(comm: Communicator) -> None:
    """The same bits as one rank's fold of the same nodes, for even, uneven and empty shares."""
    for columns, unit in ((4096, 64), (1536, 128), (96, 32)):
        for weights in ([1] * comm.size, [1 + (r * 7) % 3 for r in range(comm.size)]):
            plan = RowPartition.over(ReductionTree(columns, unit), weights).plan
            rng = np.random.default_rng(columns)
            nodes = rng.normal(size=(3, sum(plan.counts), 17)).astype(np.float32)
            start = sum(plan.counts[: comm.rank])
            own = nodes[:, start : start + plan.counts[comm.rank]].copy()
            expected = LocalComm().reduce_nodes(nodes, plan)
            same(comm.reduce_nodes(own, plan), expected)
            same(comm.reduce_nodes(torch.from_numpy(own), plan), expected)


def subgroups(comm: Communicator) -> None:
    """Two halves, in an order of their own, and a group within a group."""
    with pytest.raises(ValueError, match="subgroup"):
        comm.subgroup([0, 0])
    everyone = list(reversed(range(comm.size)))
    whole = comm.subgroup(everyone)
    assert whole is not None
    assert whole.rank == comm.size - 1 - comm.rank
    expected = np.asarray(everyone)
    same(whole.all_gather(np.asarray([comm.rank]), [1] * comm.size), expected)
    first, second = [0, comm.size - 1], list(range(1, comm.size - 1))
    for ranks in (first, second):
        group = comm.subgroup(ranks)
        assert (group is not None) == (comm.rank in ranks)
        if group is not None:
            parts = [values(r, (6,), np.float32) for r in ranks]
            same(group.all_reduce(parts[group.rank].copy()), np.asarray(sum(parts[1:], parts[0])))
            group.close()
    nested = whole.subgroup([0, 1])
    assert (nested is None) == (whole.rank > 1)
    if nested is not None:
        same(nested.all_gather(np.asarray([comm.rank]), [1, 1]), expected[:2])
    alone = comm.subgroup([comm.size - 1])
    assert isinstance(alone, LocalComm) == (comm.rank == comm.size - 1)
    whole.close()
    with pytest.raises(ValueError, match="closed"):
        whole.barrier()


def counters(comm: Communicator) -> None:
    """One call an operation, with the bytes that this rank brings to it."""
    comm.counters.reset()
    x, own = np.ones((comm.size, 2), np.float32), np.ones(comm.rank, np.int64)
    plan = RowPartition.over(ReductionTree(1024, 64), [1] * comm.size).plan
    nodes = np.ones((2, plan.counts[comm.rank], 8), np.float32)
    comm.all_reduce(torch.ones(10, dtype=torch.bfloat16))
    comm.reduce_nodes(nodes, plan)
    comm.reduce_scatter(x, [1] * comm.size)
    comm.all_gather(own, list(range(comm.size)))
    comm.broadcast(np.ones(3, np.int8), root=comm.size - 1)
    comm.barrier()
    found = {name: (count.calls, count.bytes) for name, count in comm.counters.by_operation.items()}
    assert found == {
        "all_reduce": (1, 20),
        "reduce_nodes": (1, nodes.nbytes),
        "reduce_scatter": (1, x.nbytes),
        "all_gather": (1, own.nbytes),
        "broadcast": (1, 3 if comm.rank == comm.size - 1 else 0),
        "barrier": (1, 0),
    }
    assert comm.counters.all_reduces == 2
    assert comm.counters.seconds > 0


def crossed(comm: TorchComm) -> None:
    """Ranks that wait for each other: all are there, so the error says where each of them stands."""
    store = PrefixStore("crossed", comm._group.store)
    group = TorchComm(store, comm.rank, comm.size, timeout=0.5, loopback=True)
    with pytest.raises(RankFailed, match=r"recv #1 .*not done after 0.5 s, with rank \d in recv #1"):
        group.recv(np.zeros(3, np.float32), (comm.rank + 1) % comm.size)


def missing(comm: TorchComm) -> None:
    """The last rank does not join."""
    if comm.rank < comm.size - 1:
        with pytest.raises(RankFailed, match=f"no sign of rank {comm.size - 1}") as caught:
            TorchComm(PrefixStore("missing", comm._group.store), comm.rank, comm.size, timeout=1.0)
        assert caught.value.rank == comm.size - 1


def endless(comm: TorchComm, victim: int, how: str) -> None:
    """All-reduce for ever, with a deadline of 4 s, until the victim dies or stops inside one, or raises."""
    store = PrefixStore("endless", comm._group.store)
    comm = TorchComm(store, comm.rank, comm.size, timeout=4, loopback=True)
    comm.barrier()  # all have joined before the victim meets its fate
    if how.startswith("SIG") and comm.rank == victim:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.Signals[how])).start()
    for turn in range(1_000_000):
        if how == "raise" and comm.rank == victim and turn == 20:
            raise LookupError("a tensor fell over")
        comm.all_reduce(np.ones(50_000, np.float32))
