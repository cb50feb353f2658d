"""Start, liveness and teardown of ranks 1 to N - 1, as children of the process that holds rank 0."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import serried
from serried.errors import RankFailed
from serried.parallel.link import Kind, pack_frame
from serried.parallel.rank_process import DIED, RankProcess, Verdict, judge

POLITE = 1.0  # seconds for the ranks to end by themselves
GRACE = 1.0  # seconds from SIGTERM to SIGKILL


class RankProcesses:
    """Ranks `first` to size - 1, each `python -m module`, which takes its end with ChildLink.from_argv().

    payload: bytes for every rank (the engine's configuration). env: the environment to pass on (config.py
    reads it). store_fd: a memfd that all ranks share, for torch_comm.anonymous_store. For use by one thread
    at a time. The ranks end with close(), as a context manager, when this object is collected, and at exit.
    Raises RankFailed where a rank cannot be started.
    """

    def __init__(
        self,
        module: str,
        size: int,
        payload: bytes,
        threads_per_rank: int,
        env: Mapping[str, str],
        timeout: float = 60.0,
        first: int = 1,
    ) -> None:
        self.size = size
        self._first = first
        self.store_fd = os.memfd_create("serried-store")
        death_fd, hold_fd = os.pipe()
        self._ranks: list[RankProcess] = []
        self._finalizer = weakref.finalize(self, _end_all, self._ranks, (hold_fd, self.store_fd), os.getpid())
        child_env = _child_env(env, threads_per_rank)
        try:
            for rank in range(first, size):
                fds = (death_fd, self.store_fd)
                self._ranks.append(RankProcess(module, rank, size, fds, child_env))
            self.broadcast(payload, timeout)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(death_fd)

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1 to size - 1."""
        return [rank.process.pid for rank in self._ranks]

    def wait_ready(self, timeout: float = 120.0) -> None:
        """Return when every rank has called ready(); RankFailed after the deadline or where one fails."""
        deadline = time.monotonic() + timeout
        while waiting := [rank for rank in self._ranks if not rank.is_ready]:
            self._raise_worst()
            if not self._listen(deadline):
                who = ", ".join(str(rank.rank) for rank in waiting)
                raise RankFailed(waiting[0].rank, f"not ready after {timeout:g} s (waited for: {who})")

    def broadcast(self, frame: bytes, timeout: float = 60.0) -> None:
        """Hand a frame to every rank; RankFailed where one takes it not in time, or is gone."""
        deadline = time.monotonic() + timeout
        packed = pack_frame(Kind.DATA, frame)
        pending = [(rank, memoryview(packed)) for rank in self._ranks]
        while pending := [(rank, rest) for rank, data in pending if (rest := self._offer(rank, data))]:
            if not _select([rank for rank, _ in pending], selectors.EVENT_WRITE, deadline):
                late = pending[0][0].rank
                raise RankFailed(late, f"took no step for {timeout:g} s")

    def recv(self, rank: int, timeout: float = 60.0) -> bytes:
        """The next frame that a rank has sent; RankFailed after the deadline or where any rank fails."""
        deadline = time.monotonic() + timeout
        sender = self._ranks[rank - self._first]
        while not sender.inbox:
            self._raise_worst()
            if not self._listen(deadline):
                raise RankFailed(rank, f"sent nothing for {timeout:g} s")
        return sender.inbox.popleft()

    def check(self) -> None:
        """Raise RankFailed for a rank that has died or reported an error; return at once otherwise."""
        while self._listen(0.0):
            pass
        self._raise_worst()

    def failure(self, seen: RankFailed, after: float = 2.0) -> RankFailed:
        """The culprit, when a collective failed here with `seen`: waits briefly for who died or reported."""
        deadline = time.monotonic() + after
        while not (known := self._verdicts()) or known[0].grade > DIED:
            if not self._listen(deadline):
                break
        return min([judge(seen, 0), *known], key=lambda verdict: verdict.grade).error

    def close(self) -> None:
        """End all ranks: hang up, then SIGTERM, then SIGKILL. May be called again."""
        self._finalizer()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self, deadline: float) -> bool:
        """Wait until the deadline for any rank to send or die, and take it in; False if none did."""
        active = _select([r for r in self._ranks if not r.is_gone], selectors.EVENT_READ, deadline)
        for rank in active:
            rank.read()
        return bool(active)

    def _verdicts(self) -> list[Verdict]:
        """All that is known against any rank, the most believable first."""
        found = [verdict for rank in self._ranks if (verdict := rank.verdict())]
        return sorted(found, key=lambda verdict: verdict.grade)

    def _raise_worst(self) -> None:
        if known := self._verdicts():
            raise known[0].error

    def _offer(self, rank: RankProcess, data: memoryview) -> memoryview:
        """Send what the rank's socket takes at once; the rest comes back."""
        try:
            return data[rank.socket.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return data
        except OSError as error:
            raise self.failure(RankFailed(rank.rank, f"its link is broken ({error})")) from error


def _child_env(env: Mapping[str, str], threads_per_rank: int) -> dict[str, str]:
    """The environment of a rank: the same serried, so many threads, output as it comes."""
    home = str(Path(serried.__file__).parents[1])
    paths = [home, *filter(None, [env.get("PYTHONPATH")])]
    return {
        **env,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads_per_rank),
        "MKL_NUM_THREADS": str(threads_per_rank),
    }


def _select(ranks: Sequence[RankProcess], event: int, deadline: float) -> list[RankProcess]:
    """The ranks whose sockets are ready; none after the deadline."""
    if not ranks:
        return []
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.socket, event, rank)
        ready = selector.select(max(0.0, deadline - time.monotonic()))
    return [key.data for key, _ in ready]


def _end_all(ranks: list[RankProcess], fds: Iterable[int], owner: int) -> None:
    """End the processes by their handles and close what belongs to them."""
    if os.getpid() != owner:  # a fork of our process: the ranks are not its children
        return
    for rank in ranks:
        with suppress(OSError):  # it has hung up already
            rank.socket.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + POLITE
    for rank in ranks:
        rank.end(deadline)
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE
        alive = [rank for rank in ranks if rank.process.poll() is None]
        for rank in alive:
            rank.process.send_signal(signal_number)
        for rank in alive:
            rank.end(deadline)
    for rank in ranks:
        rank.finish()
    for fd in fds:
        os.close(fd)
