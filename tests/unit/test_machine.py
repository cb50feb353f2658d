"""What a machine is said to have, as its kernel and its control groups would tell it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serried import machine
from serried.machine import available_cores, available_memory, cores_of_rank, numa_nodes, peak_rss_bytes

Fake = Callable[..., None]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    """A machine: its NUMA nodes as the kernel writes them, the cores that are allowed, files of /sys and /proc."""

    def make(nodes: dict[int, str] | None = None, allowed: set[int] | None = None, **files: str) -> None:
        folder = tmp_path / "node"
        for number, cpulist in (nodes or {}).items():
            (folder / f"node{number}").mkdir(parents=True)
            (folder / f"node{number}" / "cpulist").write_text(cpulist + "\n")
        (folder / "possible").parent.mkdir(exist_ok=True)
        (folder / "possible").write_text("0-63\n")
        monkeypatch.setattr(machine, "Path", lambda path: {"/sys/devices/system/node": folder}[path])
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed or {0, 1}))
        monkeypatch.setattr(machine, "open", lambda path, **_: fake_file(files, path), raising=False)

    return make


def fake_file(files: dict[str, str], path: str) -> Any:
    """cpu_max for /sys/fs/cgroup/cpu.max, and so on."""
    name = Path(path).name.replace(".", "_")
    if name not in files:
        raise FileNotFoundError(path)
    return io.StringIO(files[name])


# --- Cores ---


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("0", [0]),
        ("0-3", [0, 1, 2, 3]),
        ("0-3,8", [0, 1, 2, 3, 8]),
        ("0,2,4-5,64-65\n", [0, 2, 4, 5, 64, 65]),
        ("7-7", [7]),
        ("", []),
        ("\n", []),
    ],
)
def test_the_kernels_notation_of_cores(text: str, cores: list[int]) -> None:
    assert machine._cpu_list(text) == cores


@given(st.sets(st.integers(0, 300)))
def test_any_list_of_cores(cores: set[int]) -> None:
    """As the kernel's bitmap_print_list writes it."""
    ordered = sorted(cores)
    starts = [c for c in ordered if c - 1 not in cores]
    ends = [c for c in ordered if c + 1 not in cores]
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    assert machine._cpu_list(text + "\n") == ordered


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        (None, 8),
        ("max 100000", 8),
        ("400000 100000", 4),
        ("350000 100000", 4),  # a part of a core is a core that may be used
        ("100000 100000", 1),
        ("20000 100000", 1),
        ("1000 100000", 1),
        ("1600000 100000", 8),
        ("200000 50000", 4),
        ("", 8),
        ("nonsense", 8),
    ],
)
def test_available_cores_of_a_quota(fake: Fake, quota: str | None, cores: int) -> None:
    fake(allowed=set(range(8)), **({} if quota is None else {"cpu_max": quota + "\n"}))
    assert available_cores() == cores


def test_available_cores_are_those_of_the_affinity(fake: Fake) -> None:
    fake(allowed={3, 5, 7})
    assert available_cores() == 3


def test_the_real_affinity_counts() -> None:
    """Of a process that may run on one core only."""
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    code += "from serried.machine import *; print(available_cores(), cores_of_rank(0, 1, 1), cores_of_rank(0, 2, 1))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "1 [] []"


# --- NUMA nodes ---

TWO_NODES = {0: "0-3,8-11", 1: "4-7,12-15"}


def test_one_node(fake: Fake) -> None:
    fake({0: "0-3"}, {0, 1, 2, 3})
    assert numa_nodes() == [[0, 1, 2, 3]]


def test_several_nodes_in_order(fake: Fake) -> None:
    fake({0: "0-1", 1: "2-3", 2: "4-5", 10: "6-7"}, set(range(8)))
    assert numa_nodes() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_only_what_is_allowed(fake: Fake) -> None:
    fake(TWO_NODES, {1, 2, 8, 12})
    assert numa_nodes() == [[1, 2, 8], [12]]


def test_nodes_without_cores_of_ours_are_left_out(fake: Fake) -> None:
    """Of memory alone (CXL), and those that a cpuset forbids."""
    fake({0: "0-3", 1: "4-7", 2: ""}, {4, 5})
    assert numa_nodes() == [[4, 5]]


def test_a_kernel_that_tells_nothing(fake: Fake) -> None:
    fake({}, {5, 2, 3})
    assert numa_nodes() == [[2, 3, 5]]


def test_a_kernel_that_tells_not_all(fake: Fake) -> None:
    fake({0: "0-1"}, {0, 1, 2, 3})
    assert numa_nodes() == [[0, 1, 2, 3]]


# --- The cores of a rank ---


def test_ranks_that_take_the_whole_machine_are_bound(fake: Fake) -> None:
    """Node by node: a rank lies within one where it fits."""
    fake(TWO_NODES, set(range(16)))
    assert cores_of_rank(0, 2, 8) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert cores_of_rank(1, 2, 8) == [4, 5, 6, 7, 12, 13, 14, 15]
    assert [cores_of_rank(rank, 4, 4) for rank in range(4)] == [
        [0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 6, 7], [12, 13, 14, 15]
    ]  # fmt: skip
    assert [cores_of_rank(rank, 16, 1) for rank in (0, 7, 8, 15)] == [[0], [11], [4], [15]]
    assert cores_of_rank(0, 1, 16) == [*machine._cpu_list(TWO_NODES[0]), *machine._cpu_list(TWO_NODES[1])]


@pytest.mark.parametrize(("ranks", "threads"), [(1, 1), (1, 8), (2, 4), (2, 16), (3, 5), (17, 1), (16, 2)])
def test_ranks_that_do_not_are_left_free(fake: Fake, ranks: int, threads: int) -> None:
    """Two engines side by side would crowd on the same cores; and more threads than cores have none of their own."""
    fake(TWO_NODES, set(range(16)))
    assert [cores_of_rank(rank, ranks, threads) for rank in range(ranks)] == [[]] * ranks


def test_one_core_needs_no_binding(fake: Fake) -> None:
    fake({0: "0"}, {0})
    assert cores_of_rank(0, 1, 1) == []


def test_a_quota_leaves_ranks_free(fake: Fake) -> None:
    """Which cores the quota's time is spent on is the kernel's choice."""
    fake({0: "0-3"}, set(range(4)), cpu_max="200000 100000")
    assert cores_of_rank(0, 2, 1) == cores_of_rank(0, 2, 2) == cores_of_rank(0, 4, 1) == []
    fake(None, set(range(4)), cpu_max="400000 100000")
    assert [cores_of_rank(rank, 2, 2) for rank in range(2)] == [[0, 1], [2, 3]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_every_core_is_one_ranks(sizes: list[int], data: st.DataObject) -> None:
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    nodes = [list(range(a, b)) for a, b in pairwise(edges)]
    whole = edges[-1]
    ranks = data.draw(st.sampled_from([n for n in range(1, whole + 1) if whole % n == 0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "numa_nodes", lambda: nodes)
        patch.setattr(machine, "available_cores", lambda: whole)
        bound = [cores_of_rank(rank, ranks, whole // ranks) for rank in range(ranks)]
    if whole == 1:
        assert bound == [[]]
    else:
        assert [core for cores in bound for core in cores] == list(range(whole))
        assert all(len(cores) == whole // ranks for cores in bound)


# --- Memory ---

MEMINFO = "MemTotal:       16000 kB\nMemFree:  1000 kB\nMemAvailable:    8000 kB\n"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8000 * 1024),
        ({"memory_max": "max\n"}, 8000 * 1024),
        ({"memory_max": "3000000\n", "memory_current": "1000000\n"}, 2_000_000),
        ({"memory_max": "99999999999\n", "memory_current": "5\n"}, 8000 * 1024),
        ({"memory_max": "1000000\n", "memory_current": "1000001\n"}, 0),
        ({"memory_max": "3000000\n"}, 8000 * 1024),
    ],
)
def test_available_memory(fake: Fake, files: dict[str, str], free: int) -> None:
    fake(meminfo=MEMINFO, **files)
    assert available_memory() == free


def test_the_real_machine() -> None:
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))
    assert sorted(core for node in numa_nodes() for core in node) == sorted(os.sched_getaffinity(0))
    assert 1 << 20 < available_memory() < 1 << 50
    assert 1 << 20 < peak_rss_bytes() < 1 << 50


def test_the_peak_is_this_processs_own() -> None:
    """A small child of a large process starts anew (ru_maxrss would not), and what was freed still counts."""
    ballast = b"x" * (200 << 20)
    code = "from serried.machine import peak_rss_bytes as p; a = p(); b = b'x' * (80 << 20); del b; print(a, p())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    before, after = map(int, done.stdout.split())
    assert before < 100 << 20 < len(ballast)
    assert after - before > 60 << 20
