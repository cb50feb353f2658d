"""What this machine has to give: cores and memory, as the kernel and its control groups allow them."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Cores that this process may run on: its affinity mask, cut by a cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:  # noqa: PTH123 (one line of a special file)
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, -(-int(quota) // int(period))))


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
