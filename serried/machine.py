"""What this machine has to give: cores and memory, as the kernel and its control groups allow them."""

from __future__ import annotations

import os
from pathlib import Path


def available_cores() -> int:
    """Cores that this process may run on: its affinity mask, cut by a cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:  # noqa: PTH123 (one line of a special file)
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, -(-int(quota) // int(period))))


def cores_of_rank(rank: int, ranks: int, threads: int) -> list[int]:
    """The cores that a rank's threads are bound to; empty where binding could do harm.

    Ranks are bound only where together they use every core that this process may use: else two engines side by side
    would crowd on the same ones. Cores are counted NUMA node by NUMA node, so that a rank lies within one where it
    fits. (A rank then touches its memory first, and the kernel places it on that node.)
    """
    cores = [core for node in numa_nodes() for core in node]
    if ranks * threads != len(cores) or ranks * threads == 1 or available_cores() != len(cores):
        return []
    return cores[rank * threads : (rank + 1) * threads]


def numa_nodes() -> list[list[int]]:
    """The cores of each NUMA node that this process may run on."""
    allowed = os.sched_getaffinity(0)
    nodes = []
    for entry in sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        cores = _cpu_list((entry / "cpulist").read_text(encoding="ascii"))
        nodes.append([core for core in cores if core in allowed])
    nodes = [node for node in nodes if node]
    return nodes if sum(map(len, nodes)) == len(allowed) else [sorted(allowed)]


def _cpu_list(text: str) -> list[int]:
    """The kernel's notation: 0-3,8."""
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1) if first else []
    return cores


def available_memory() -> int:
    """Bytes of memory that this process may still take: of the machine, cut by a cgroup's limit."""
    free = _meminfo("/proc/meminfo", "MemAvailable") * 1024
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:  # noqa: PTH123
            limit = int(file.read())
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:  # noqa: PTH123
            return max(0, min(free, limit - int(file.read())))
    except (OSError, ValueError):  # no cgroup, or no limit
        return free


def peak_rss_bytes() -> int:
    """The most memory that this process has held (VmHWM: unlike ru_maxrss it does not inherit the parent's)."""
    return _meminfo("/proc/self/status", "VmHWM") * 1024


def _meminfo(path: str, key: str) -> int:
    with open(path, encoding="ascii") as file:  # noqa: PTH123
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1])
    return 0
