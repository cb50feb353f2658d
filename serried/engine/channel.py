"""How a step travels from rank 0 to its child ranks: through a ring in shared memory, or over their sockets.

A frame is a packed StepInput, or the one word TELL_TIMES; an empty one says that there are no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from serried.backends.step import Int32
from serried.parallel.comm import Communicator
from serried.parallel.launch import RankProcesses
from serried.parallel.link import ChildLink
from serried.parallel.shm import ShmComm, StepRing

TELL_TIMES = -1  # a frame of this word alone: no step, but Worker.gather_times


NO_MORE = np.empty(0, np.int32)


class StepChannel(Protocol):
    """Rank 0's end."""

    def send(self, flat: Int32) -> None:
        """Hand a step to every rank. RankFailed names the one that does not take it in time, or is gone."""
        ...

    def close(self) -> None:
        """No more steps."""
        ...


class _Links:
    """Over the sockets of the ranks: for groups that share no memory (gloo, NCCL)."""

    def __init__(self, processes: RankProcesses, timeout: float) -> None:
        self._processes, self._timeout = processes, timeout

    def send(self, flat: Int32) -> None:
        self._processes.broadcast(flat.tobytes(), self._timeout)

    def close(self) -> None:
        self.send(NO_MORE)


class _Ring:
    def __init__(self, ring: StepRing, timeout: float) -> None:
        self._ring, self._timeout = ring, timeout

    def send(self, flat: Int32) -> None:
        self._ring.write(flat, self._timeout)

    def close(self) -> None:
        try:
            self.send(NO_MORE)
        finally:
            self._ring.close()


def open_channel(comm: Communicator, processes: RankProcesses, timeout: float) -> StepChannel:
    """Rank 0's end of the channel to its children, which call receive_steps at the same time."""
    return _Ring(comm.step_ring(), timeout) if isinstance(comm, ShmComm) else _Links(processes, timeout)


def receive_steps(comm: Communicator, link: ChildLink) -> Iterator[Int32]:
    """A child's end: the steps, until there are no more."""
    if not isinstance(comm, ShmComm):
        link.ready()
        while flat := link.recv():
            yield np.frombuffer(flat, np.int32)
        return
    ring = comm.step_ring()
    link.ready()
    while flat := ring.read():
        yield np.frombuffer(flat, np.int32)
