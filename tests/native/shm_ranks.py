"""Starts worlds of real processes over shared memory, for the tests."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import msgspec

from serried.parallel.launch import RankProcesses
from serried.parallel.shm import ShmComm

HERE = Path(__file__).parent
DIST = HERE.parent / "dist"


def environment() -> dict[str, str]:
    """In which a process finds the modules of this directory and of tests/dist."""
    paths = [str(HERE), str(DIST), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run_check(name: str, comm: ShmComm, arguments: dict[str, Any]) -> None:
    """Run module.function of a check on one rank."""
    module, function = name.split(".")
    getattr(importlib.import_module(module), function)(comm, **arguments)


class ShmWorld:
    """Rank 0 in this process and the others in theirs, all of which run the checks that are named.

    absent: a rank that does not join, but raises or (how="sleep") stays away.
    """

    def __init__(self, size: int, timeout: float = 30.0, slot_bytes: int = 1 << 20, **absent: Any) -> None:
        self.size = size
        payload = msgspec.msgpack.encode({"timeout": timeout, "slot_bytes": slot_bytes, **absent})
        self.processes = RankProcesses("shm_worker", size, payload, 1, environment())
        fd, watch = self.processes.store_fd, self.processes.check
        self.comm = ShmComm(fd, 0, size, timeout, slot_bytes=slot_bytes, watch=watch)
        self.processes.wait_ready()

    def run(self, check: str, **arguments: Any) -> None:
        """Let all ranks do a check, and hear what the others found."""
        self.processes.broadcast(msgspec.msgpack.encode([check, arguments]))
        run_check(check, self.comm, arguments)
        for rank in range(1, self.size):
            verdict = self.processes.recv(rank).decode()
            assert not verdict, f"rank {rank}:\n{verdict}"

    def close(self) -> None:
        self.comm.close()
        self.processes.close()
