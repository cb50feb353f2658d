"""A rank dies, raises or stops inside a collective: an error names it within seconds, and nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from ranks import HERE, Watch, World

from serried.errors import RankFailed


@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize(
    ("how", "reason", "trace"),
    [
        ("SIGKILL", "killed by SIGKILL", ""),
        ("raise", "LookupError: a tensor fell over", 'raise LookupError("a tensor fell over")'),
    ],
)
def test_a_rank_dies_inside_a_collective(victim: int, how: str, reason: str, trace: str) -> None:
    world = World(3)
    watch = Watch(world.processes.pids)
    world.begin("endless", victim=victim, how=how)
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"all_reduce #\d+ of ranks 0, 1, 2: a peer of rank 0") as caught:
        world.finish("endless", victim=victim, how=how)
    error = world.processes.failure(caught.value)
    assert time.monotonic() - started < 5
    assert error.rank == victim
    assert reason in error.reason
    assert trace in error.traceback
    with pytest.raises(RankFailed, match="all_reduce"):  # the whole world goes on failing, at once
        world.comm.all_reduce(np.ones(3, np.float32))
    world.close()
    assert not watch.survivors(0)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_fails_before_it_joins(victim: int) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed, match=f"rank {victim}: MemoryError: no room for PyTorch"):
        World(3, absent=victim)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_stops_inside_a_collective(victim: int) -> None:
    """Alive but silent: the deadline ends the wait, and the ranks that do answer tell who does not."""
    world = World(3)
    watch = Watch(world.processes.pids)
    world.begin("endless", victim=victim, how="SIGSTOP")
    silent = rf"rank {victim}: all_reduce #\d+ of ranks 0, 1, 2: no sign of rank {victim} within 4 s"
    with pytest.raises(RankFailed, match=silent) as caught:
        world.finish("endless", victim=victim, how="SIGSTOP")
    assert world.processes.failure(caught.value, after=0.5).rank == victim
    world.close()
    assert not watch.survivors(0)


def test_rank_0_dies_inside_a_collective() -> None:
    with subprocess.Popen(
        [sys.executable, HERE / "parent_script.py", "collective"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    ) as script:
        assert script.stdout is not None
        watch = Watch([int(pid) for pid in script.stdout.readline().split()])
        time.sleep(0.3)  # well into the collectives
        script.kill()
        assert not watch.survivors(5)
