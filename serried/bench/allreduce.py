"""`serried bench allreduce`: shared memory's three algorithms against gloo, message by message, in one run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from serried.config import child_environment
from serried.errors import InputError
from serried.parallel.launch import RankProcesses

SIZES = tuple(1 << bits for bits in range(10, 24))  # 1 KiB to 8 MiB
RANK_MODULE = "serried.bench.allreduce_rank"
SHM_ALGORITHMS = ("one-shot", "two-shot", "ring")
SECONDS = 0.03  # of calls in one measurement
TIMEOUT = 120.0
MAX_RANKS = 256  # of a group in shared memory


class Task(msgspec.Struct, frozen=True):
    """One measurement: so many calls of an all-reduce of so many bytes (float32)."""

    bytes: int
    algorithm: str
    calls: int


def bench_allreduce(worlds: Sequence[int], rounds: int, report: Callable[[int, int], None]) -> dict[str, Any]:
    """Median microseconds of an all-reduce for each world, size and algorithm; gloo where PyTorch is installed."""
    if not all(2 <= ranks <= MAX_RANKS for ranks in worlds):
        raise InputError(f"--ranks {','.join(map(str, worlds))}: expected numbers from 2 to {MAX_RANKS}")
    runs = []
    done, total = 0, len(worlds) * len(SIZES)
    for ranks in worlds:
        with ExitStack() as stack:
            groups = {"shm": stack.enter_context(_start("shm", ranks))}
            if importlib.util.find_spec("torch") is not None:
                groups["gloo"] = stack.enter_context(_start("gloo", ranks))
            for size in SIZES:
                runs.append(_one_size(groups, ranks, size, rounds))
                done += 1
                report(done, total)
    return {"bench": "allreduce", "runs": runs}


def _one_size(groups: dict[str, RankProcesses], ranks: int, size: int, rounds: int) -> dict[str, Any]:
    values: dict[str, list[float]] = {}
    kinds = [("shm", name) for name in SHM_ALGORITHMS] + [("gloo", "gloo")] * ("gloo" in groups)
    calls = dict.fromkeys((name for _, name in kinds), 3)
    for _ in range(rounds + 1):
        for kind, name in kinds:
            seconds = _ask(groups[kind], Task(size, name, calls[name]))
            calls[name] = max(3, min(2000, int(SECONDS / seconds)))
            values.setdefault(name, []).append(seconds * 1e6)
    medians = {name: sorted(found[1:])[len(found) // 2 - 1] for name, found in values.items()}
    figures: dict[str, Any] = {"ranks": ranks, "bytes": size}
    for name, us in medians.items():
        figures[f"{name.replace('-', '_')}_us"] = us
    if "gloo" in medians:
        figures["gloo_over_best"] = medians["gloo"] / min(medians[name] for name in SHM_ALGORITHMS)
    return figures


def _start(kind: str, ranks: int) -> RankProcesses:
    payload = msgspec.msgpack.encode(kind)
    processes = RankProcesses(RANK_MODULE, ranks, payload, 1, child_environment(), first=0)
    processes.wait_ready(TIMEOUT)
    return processes


def _ask(processes: RankProcesses, task: Task) -> float:
    """Seconds of one call, as rank 0 saw it."""
    processes.broadcast(msgspec.msgpack.encode(task))
    return float(msgspec.msgpack.decode(processes.recv(0, TIMEOUT), type=float))
