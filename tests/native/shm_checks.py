"""What is special about ShmComm, as every rank of a world does and finds it. Needs no PyTorch."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from serried.errors import RankFailed
from serried.parallel.comm import LocalComm
from serried.parallel.partition import RowPartition
from serried.parallel.reduction import ReductionTree
from serried.parallel.shm import ShmComm


def floats(rank: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=shape).astype(np.float32)


def sums(comm: ShmComm) -> None:
    """One order of addition for all sizes and shots, that of the ranks; the ring has its own."""
    for count in (1, 63, 5_000, 700_001):
        parts = [floats(r, count) for r in range(comm.size)]
        expected = parts[0].copy()
        for part in parts[1:]:
            expected += part
        for comm.algorithm in ("one-shot", "two-shot", "auto", "ring"):
            got = comm.all_reduce(parts[comm.rank].copy())
            if comm.algorithm != "ring":
                assert got.tobytes() == expected.tobytes()
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
            assert got.tobytes() == comm.broadcast(got.copy()).tobytes()  # that of rank 0
    comm.algorithm = "auto"


def halves(comm: ShmComm) -> None:
    """float16 and bfloat16 are widened, summed and rounded once, to nearest even; special values survive."""
    import ml_dtypes

    for dtype in (np.float16, ml_dtypes.bfloat16):
        everything = np.arange(1 << 16, dtype=np.uint16).view(dtype)
        for comm.algorithm in ("one-shot", "two-shot", "ring"):
            mine = everything if comm.rank == 0 else np.full(1 << 16, -0.0, dtype)
            got = comm.all_reduce(mine.copy())
            nan = np.isnan(everything.astype(np.float32))
            assert np.array_equal(got[~nan].view(np.uint16), everything[~nan].view(np.uint16))
            assert np.isnan(got[nan].astype(np.float32)).all()
            parts = [(floats(r, 10_000) * 10.0 ** (r % 4 - 2)).astype(dtype) for r in range(comm.size)]
            total = parts[0].astype(np.float32)
            for part in parts[1:]:
                total += part.astype(np.float32)
            got = comm.all_reduce(parts[comm.rank].copy())
            if comm.algorithm != "ring":
                assert got.tobytes() == total.astype(dtype).tobytes()
    comm.algorithm = "auto"


def nodes(comm: ShmComm) -> None:
    """Pieces by tokens, and by columns where one token is larger than a slot; both shots; the same bits."""
    for tokens, columns in ((0, 8), (1, 700), (37, 300), (3, 20_000)):
        plan = RowPartition.over(ReductionTree(4096, 64), [1 + r % 3 for r in range(comm.size)]).plan
        everyone = floats(columns, tokens, sum(plan.counts), columns)
        start = sum(plan.counts[: comm.rank])
        own = everyone[:, start : start + plan.counts[comm.rank]]
        expected = LocalComm().reduce_nodes(everyone, plan)
        for comm.algorithm in ("one-shot", "two-shot", "ring"):
            assert comm.reduce_nodes(own, plan).tobytes() == expected.tobytes()
    comm.algorithm = "auto"
    with pytest.raises(ValueError, match="brings float32"):
        comm.reduce_nodes(np.zeros((1, 99, 4), np.float32), plan)


def large_messages(comm: ShmComm) -> None:
    """Larger than all chunks of a mailbox, and than a slot."""
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    here, there = floats(comm.rank, 300_000), floats(source, 300_000)
    if comm.rank % 2:
        assert comm.recv(np.empty_like(here), source).tobytes() == there.tobytes()
    comm.send(here, to)
    if comm.rank % 2 == 0:
        assert comm.recv(np.empty_like(here), source).tobytes() == there.tobytes()
    assert comm.broadcast(here.copy()).tobytes() == floats(0, 300_000).tobytes()
    whole = comm.all_gather(here.reshape(3, -1), [100_000] * comm.size, dim=1)
    expected = np.concatenate([floats(r, 300_000).reshape(3, -1) for r in range(comm.size)], 1)
    assert whole.tobytes() == expected.tobytes()
    parts = [(r % 2) * 50_000 for r in range(comm.size)]
    total = floats(0, sum(parts))
    for r in range(1, comm.size):
        total += floats(r, sum(parts))
    start = sum(parts[: comm.rank])
    got = comm.reduce_scatter(floats(comm.rank, sum(parts)), parts)
    assert got.tobytes() == total[start : start + parts[comm.rank]].tobytes()


def sends_need_no_others(comm: ShmComm) -> None:
    """Two ranks talk while all others are in a barrier."""
    last = comm.size - 1
    for _ in range(100):
        if comm.rank == 0:
            comm.send(floats(1, 100), last)
            comm.recv(np.empty(100, np.float32), last)
        if comm.rank == last:
            comm.send(comm.recv(np.empty(100, np.float32), 0), 0)
    comm.barrier()


def instruction_sets(comm: ShmComm) -> None:
    assert comm.agree_min(comm.size - comm.rank) == 1
    assert comm.agree_min(comm.rank - 3) == -3


def waiting_is_cheap(comm: ShmComm) -> None:
    """A rank that waits long sleeps: less than 1 % of a core, or what that is above the noise in two seconds."""
    comm.barrier()
    if comm.rank == 0:
        time.sleep(2.0)
    before = time.process_time()
    comm.barrier()
    assert time.process_time() - before < 0.02 + (comm.rank == 0)


def progress_restarts_the_deadline(comm: ShmComm) -> None:
    """A rank that is slow, but gets on with its work, is waited for."""
    comm.barrier()
    usual, comm.timeout = comm.timeout, 0.5
    if comm.rank == comm.size - 1:
        for _ in range(20):
            time.sleep(0.08)
            comm.native.tick()
    comm.barrier()
    comm.timeout = math.inf
    assert comm.timeout == math.inf
    comm.timeout = usual
    comm.barrier()


def crossed(comm: ShmComm) -> None:
    """Ranks that wait for each other: all are there, so the error says where each of them stands."""
    group = comm.subgroup(range(comm.size))
    assert isinstance(group, ShmComm)
    group.timeout = 0.5
    expected = r"recv #1 .*not done after 0.5 s, with rank \d+ in (recv #1|barrier #\d+)"  # some have gone on by then
    with pytest.raises(RankFailed, match=expected) as caught:
        group.recv(np.zeros(3, np.float32), (comm.rank + 1) % comm.size)
    assert caught.value.rank == comm.rank
    with pytest.raises(RankFailed, match="recv #1"):  # it goes on failing
        group.barrier()
    group.close()
    comm.barrier()


def another_call(comm: ShmComm) -> None:
    """A rank that is in another operation is named, and the error is that of all."""
    last = comm.size - 1
    with pytest.raises(RankFailed, match="made another call") as caught:
        if comm.rank == last:
            comm.all_gather(np.ones(1, np.int8), [1] * comm.size)
        else:
            comm.barrier()
    assert caught.value.rank in (0, last)


def sizes_differ(comm: ShmComm) -> None:
    if comm.rank == 0:
        comm.send(np.ones(3, np.float32), 1)
    if comm.rank == 1:
        with pytest.raises(RankFailed, match="rank 0 sent 12 bytes where 8 were expected"):
            comm.recv(np.ones(2, np.float32), 0)


def a_rank_fails(comm: ShmComm) -> None:
    """It says why, and all others raise that."""
    if comm.rank == 1:
        comm.fail("LookupError: no such tensor")
    with pytest.raises(RankFailed, match="rank 1: LookupError: no such tensor") as caught:
        comm.barrier()
    assert caught.value.rank == 1
    with pytest.raises(RankFailed, match="no such tensor"):
        comm.barrier()


def a_rank_leaves(comm: ShmComm) -> None:
    if comm.rank == 1:
        comm.close()
        return
    with pytest.raises(RankFailed, match=r"barrier #\d+ of ranks 0, 1(, 2)*: rank 1 has left") as caught:
        comm.barrier()
    assert caught.value.rank == 1
