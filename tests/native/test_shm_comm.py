"""Every operation of ShmComm in worlds of real processes, small and large slots, more ranks than cores."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from ranks import Watch
from shm_ranks import HERE, ShmWorld, environment

from serried.errors import InputError, RankFailed
from serried.parallel.shm import ShmComm

OPERATIONS = [
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "gather",
    "broadcast",
    "send_recv",
    "reduce_nodes",
    "subgroups",
    "counters",
]
CHECKS = [
    "sums",
    "halves",
    "nodes",
    "large_messages",
    "sends_need_no_others",
    "instruction_sets",
    "waiting_is_cheap",
    "progress_restarts_the_deadline",
    "crossed",
]


@pytest.fixture(scope="module", params=[(2, 1 << 20), (3, 4096), (5, 1 << 20)], ids=lambda p: f"{p[0]}x{p[1]}")
def shm_world(request: pytest.FixtureRequest) -> Iterator[ShmWorld]:
    size, slot_bytes = request.param
    world = ShmWorld(size, slot_bytes=slot_bytes)
    yield world
    world.close()


@pytest.mark.parametrize("check", OPERATIONS)
def test_operation(shm_world: ShmWorld, check: str) -> None:
    pytest.importorskip("torch")
    shm_world.run(f"comm_checks.{check}")


@pytest.mark.parametrize("check", CHECKS)
def test_check(shm_world: ShmWorld, check: str) -> None:
    shm_world.run(f"shm_checks.{check}")


def test_sixteen_ranks() -> None:
    world = ShmWorld(16)
    watch = Watch(world.processes.pids)
    for check in CHECKS:
        world.run(f"shm_checks.{check}")
    world.close()
    assert not watch.survivors(0)


@pytest.mark.parametrize("check", ["another_call", "sizes_differ", "a_rank_fails", "a_rank_leaves"])
def test_an_error_ends_the_world(check: str) -> None:
    world = ShmWorld(3)
    world.run(f"shm_checks.{check}")
    world.close()


def test_a_rank_that_fails_before_it_joins() -> None:
    with pytest.raises(RankFailed, match="rank 2: MemoryError: no room for the weights"):
        ShmWorld(3, absent=2)


def test_a_rank_that_does_not_join() -> None:
    expected = "rank 2: joining the group of ranks 0, 1, 2: no sign of rank 2 within 3 s"
    with pytest.raises(RankFailed, match=expected):
        ShmWorld(3, timeout=3, absent=2, how="sleep")


# --- Worlds of threads: enough where nobody dies ---


def in_threads(size: int, body: Callable[[int, int], Any]) -> list[Any]:
    """body(memfd, rank) on so many ranks."""
    fd = os.memfd_create("test")
    try:
        with ThreadPoolExecutor(size) as pool:
            return [future.result() for future in [pool.submit(body, fd, rank) for rank in range(size)]]
    finally:
        os.close(fd)


def test_nothing_is_left() -> None:
    """Neither descriptors, nor mappings, nor pages of subgroups."""

    def state() -> tuple[set[str], int]:
        gc.collect()
        with open("/proc/self/maps") as maps:  # noqa: PTH123
            mapped = sum("memfd:test" in line for line in maps)
        return set(os.listdir("/proc/self/fd")), mapped  # noqa: PTH208

    def body(fd: int, rank: int) -> tuple[int, int, int]:
        comm = ShmComm(fd, rank, 2, 10)
        comm.all_reduce(np.ones(300_000, np.float32))
        comm.barrier()
        before = os.fstat(fd).st_blocks
        comm.barrier()
        group = comm.subgroup([1, 0])
        assert group is not None
        group.all_reduce(np.ones(300_000, np.float32))
        comm.barrier()
        during = os.fstat(fd).st_blocks
        comm.barrier()
        group.close()
        comm.barrier()
        after = os.fstat(fd).st_blocks
        comm.barrier()
        comm.close()
        comm.close()
        with pytest.raises(ValueError, match="this rank has closed the group of ranks 0, 1"):
            comm.barrier()
        return before, during, after

    at_first = state()
    for before, during, after in in_threads(2, body):
        assert during - before > 4096  # two slots a rank, in units of 512 bytes
        assert after - before < 64  # the byte that made the file longer, and its page
    assert state() == at_first


def test_a_rank_may_take_longer_to_start_than_to_answer() -> None:
    def body(fd: int, rank: int) -> float:
        time.sleep(0.6 * rank)
        comm = ShmComm(fd, rank, 2, 0.3, joining=30)
        total = float(comm.all_reduce(np.ones(1, np.float32))[0])
        comm.close()
        return total

    assert in_threads(2, body) == [2.0, 2.0]


def test_timings() -> None:
    def body(fd: int, rank: int) -> Any:
        comm = ShmComm(fd, rank, 2, 10)
        time.sleep(0.2 * rank)
        comm.all_reduce(np.ones(10, np.float32))
        comm.broadcast(np.ones(10, np.int8))
        timings = comm.timings()
        comm.reset_timings()
        assert comm.timings() == {}
        return timings

    for rank, timings in enumerate(in_threads(2, body)):
        assert {name: t[:2] for name, t in timings.items()} == {"all_reduce": (1, 40), "broadcast": (1, 10 - 10 * rank)}
        first = timings["all_reduce"]
        assert first.wait_s <= first.total_s
        assert (first.wait_s > 0.1) == (rank == 0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"size": 3}, "another rank made it for 2 ranks with slots of 1048576 bytes .* wants 3 ranks"),
        ({"slot_bytes": 8192}, "this one wants 2 ranks with slots of 8192"),
        ({"rank": 0}, "is rank 0 already"),
    ],
)
def test_ranks_of_different_worlds(other: dict[str, int], message: str) -> None:
    fd = os.memfd_create("test")

    def alone() -> None:
        with pytest.raises(RankFailed, match="no sign of rank 1"):
            ShmComm(fd, 0, 2, 0.5)

    first = threading.Thread(target=alone)
    first.start()
    time.sleep(0.1)
    with pytest.raises(RankFailed, match=message):
        ShmComm(fd, **{"rank": 1, "size": 2, "timeout": 0.1, **other})
    first.join()
    os.close(fd)


def test_bad_input() -> None:
    with pytest.raises(InputError, match="choose one of auto, one-shot"):
        ShmComm(0, 0, 2, algorithm="tree")
    with open("/dev/null", "r+b") as null, pytest.raises(RankFailed, match="shared memory: cannot"):  # noqa: PTH123
        ShmComm(null.fileno(), 0, 2)
    other = os.memfd_create("test")
    os.write(other, b"something else")
    with pytest.raises(RankFailed, match="holds something else"):
        ShmComm(other, 0, 2)
    os.close(other)

    def body(fd: int, rank: int) -> None:
        comm = ShmComm(fd, rank, 2, 10)
        for wrong in (
            lambda: comm.all_reduce(np.zeros(3, np.float64)),
            lambda: comm.broadcast(np.zeros(3), root=2),
            lambda: comm.send(np.zeros(3), rank),
            lambda: comm.subgroup([0, 0]),
            lambda: comm.gather(np.zeros(3), [3]),
        ):
            with pytest.raises(ValueError, match=r"float64|rank|subgroup|part"):
                wrong()
        comm.barrier()

    in_threads(2, body)


# --- Deaths, in worlds without a parent: any rank can be the victim ---

FAULTS = ["one-shot", "two-shot", "ring", "reduce_nodes", "all_gather", "broadcast", "barrier", "subgroup", "around"]


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Ranks of a test that fails end too."""
    yield
    while STARTED:
        rank = STARTED.pop()
        rank.kill()
        rank.wait()


def begin(operation: str, size: int, timeout: float) -> list[subprocess.Popen[str]]:
    """Ranks that call an operation for ever, all of them in the midst of it."""
    fd = os.memfd_create("test")
    ranks = [
        subprocess.Popen(
            [sys.executable, HERE / "fault_rank.py", *map(str, (fd, rank, size, operation, timeout))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[fd],
            env=environment(),
        )
        for rank in range(size)
    ]
    STARTED.extend(ranks)
    os.close(fd)
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "in\n"
    time.sleep(0.1)
    return ranks


@pytest.mark.parametrize("operation", FAULTS)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_is_killed(operation: str, victim: int) -> None:
    """Every other rank names it within two seconds."""
    ranks = begin(operation, 3, 30)
    ranks[victim].kill()
    for rank in ranks:
        out, errors = rank.communicate(timeout=20)
        if rank is not ranks[victim]:
            named, took, reason = out.split(" ", 2)
            assert not errors
            assert int(named) == victim
            assert float(took) < 2
            assert f"rank {victim} has died (process {ranks[victim].pid})" in reason
            assert "#" in reason


@pytest.mark.parametrize("operation", ["one-shot", "ring", "around"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_is_stopped(operation: str, victim: int) -> None:
    """Alive but silent: the deadline ends the wait, and who does not answer the roll call is named."""
    ranks = begin(operation, 3, 1.0)
    ranks[victim].send_signal(19)
    for rank in ranks:
        if rank is not ranks[victim]:
            out, errors = rank.communicate(timeout=20)
            assert not errors
            assert out.split(" ", 1)[0] == str(victim)
            assert f"no sign of rank {victim} within 1 s" in out
    ranks[victim].kill()
    ranks[victim].communicate()


def test_an_interrupt_ends_a_wait() -> None:
    ranks = begin("barrier", 2, 60)
    ranks[1].send_signal(19)
    time.sleep(0.3)
    ranks[0].send_signal(2)
    _, errors = ranks[0].communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    ranks[1].kill()
    ranks[1].communicate()
