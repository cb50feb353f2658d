"""Starts worlds of real processes for the tests, and watches that none is left behind."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from typing import Any

import msgspec

from serried.parallel.launch import RankProcesses

HERE = Path(__file__).parent


def start(module: str, size: int, **payload: Any) -> RankProcesses:
    """A set of ranks that run a module of this directory, with the arguments as payload."""
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    return RankProcesses(module, size, msgspec.msgpack.encode(payload), 1, env)


class Watch:
    """Knows some processes by descriptors (pidfds), so that a reused process id cannot mislead it."""

    def __init__(self, pids: list[int]) -> None:
        self.fds = {os.pidfd_open(pid): pid for pid in pids}

    def survivors(self, seconds: float) -> list[int]:
        """Those that still live after so many seconds at most."""
        poll, deadline, alive = select.poll(), time.monotonic() + seconds, dict(self.fds)
        for fd in alive:
            poll.register(fd, select.POLLIN)
        while alive and (ready := poll.poll(max(0, deadline - time.monotonic()) * 1000)):
            for fd, _ in ready:
                poll.unregister(fd)
                del alive[fd]
        for fd in self.fds:
            os.close(fd)
        return list(alive.values())


class World:
    """Rank 0 in this process and the others in theirs, all of which run the checks of comm_checks.py."""

    def __init__(self, size: int, timeout: float = 30.0, absent: int = 0) -> None:
        from serried.parallel.torch_comm import TorchComm, anonymous_store

        self.size = size
        self.processes = start("comm_worker", size, timeout=timeout, absent=absent)
        store = anonymous_store(self.processes.store_fd, size)
        self.comm = TorchComm(store, 0, size, timeout=timeout, loopback=True, watch=self.processes.check)
        self.processes.wait_ready()

    def begin(self, check: str, **arguments: Any) -> None:
        """Let ranks 1 to size - 1 begin a check."""
        self.processes.broadcast(msgspec.msgpack.encode([check, arguments]))

    def finish(self, check: str, **arguments: Any) -> None:
        """Do rank 0's part of a check, then hear what the others found."""
        import comm_checks

        getattr(comm_checks, check)(self.comm, **arguments)
        for rank in range(1, self.size):
            verdict = self.processes.recv(rank).decode()
            assert not verdict, f"rank {rank}:\n{verdict}"

    def run(self, check: str, **arguments: Any) -> None:
        self.begin(check, **arguments)
        self.finish(check, **arguments)

    def close(self) -> None:
        self.comm.close()
        self.processes.close()
