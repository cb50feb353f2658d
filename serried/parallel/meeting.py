"""How ranks meet: they wait for each other with a deadline, and the one that is missing gets the blame.

Knows of PyTorch only what a store and a process group can do; torch_comm.py makes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

from serried.errors import RankFailed

LATE = 0.9  # of the deadline: a failure after that is a peer that did not come, before it one that went away
LOOK_AROUND = 0.2  # seconds between two looks at the liveness of those who have not joined yet
ROLL_CALL = 1.0  # seconds that ranks get to say that they, too, are stuck


class Store(Protocol):
    """What is used of a torch.distributed store; its operations raise RuntimeError where they fail."""

    def set_timeout(self, timeout: timedelta, /) -> None: ...
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


class Meeting:
    """A process group: opened when all are here, waited for with a deadline, and asked who is to blame.

    `names`: the members' ranks in the world, for error messages. `joining`, `timeout` (seconds): the deadline of
    joining, and of every operation. `open_group`: makes the process group, once all are here. `on_device`: its
    work goes on after wait() has returned, and its abort() ends that. `watch`: called now and then while others
    are awaited; may raise. Raises RankFailed where a rank does not join.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        names: Sequence[int],
        timeout: float,
        open_group: Callable[[], Any],
        on_device: bool,
        watch: Callable[[], None],
        joining: float,
    ) -> None:
        self.store, self.rank, self.names, self.timeout = store, rank, tuple(names), timeout
        self._on_device = on_device
        self._sequence = 0
        self._group: Any = self._join(open_group, watch, joining)

    def meet(self, operation: str, post: Callable[[Any], Any], peers: Sequence[int] | None = None) -> None:
        """Post one operation and wait for it; RankFailed after the deadline or where a peer is gone.

        post: makes the call on the process group. peers: the ranks that take part, where not all do.
        """
        if self._group is None:
            raise ValueError(f"{operation}: this rank has closed the group of {_ranks(self.names)}")
        self._sequence += 1
        start = time.monotonic()
        try:
            work = post(self._group)
            if self._on_device:
                self._await_device(work, start + self.timeout)
            work.wait()
        except RuntimeError as error:
            late = time.monotonic() - start > LATE * self.timeout
            raise self._failure(operation, first_line(error), late, peers) from error

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and self._on_device:
            group.abort()  # shutdown would wait for a peer that is gone

    def _join(self, open_group: Callable[[], Any], watch: Callable[[], None], joining: float) -> Any:
        what = f"joining the group of {_ranks(self.names)}"
        try:
            self.store.set_timeout(timedelta(seconds=self.timeout))
            self.store.set(f"here/{self.rank}", "")
            self._await_members(what, watch, joining)
            return open_group()
        except RuntimeError as error:
            raise RankFailed(self.names[self.rank], f"{what}: {first_line(error)}") from error

    def _await_members(self, what: str, watch: Callable[[], None], joining: float) -> None:
        """Wait until all are here: the process group's own wait can neither name the absent nor look around."""
        deadline = time.monotonic() + joining
        while absent := [self.names[r] for r in self._unset("here", range(len(self.names)), LOOK_AROUND)]:
            watch()
            if time.monotonic() > deadline:
                raise RankFailed(absent[0], f"{what}: no sign of {_ranks(absent)} within {joining:g} s")

    def _await_device(self, work: Any, deadline: float) -> None:
        """Wait on the host until the device has done the work.

        A deadline on the stream alone could not be raised here, and NCCL's own wait sleeps 1 ms a turn.
        """
        while not work.is_completed():
            if time.monotonic() > deadline:
                self._group.abort()
                raise RuntimeError("NCCL did not finish in time")

    def _failure(self, operation: str, cause: str, late: bool, peers: Sequence[int] | None) -> RankFailed:
        """Who is to blame. After a deadline the roll is called: whoever is stuck says so in the store."""
        me, here = self.names[self.rank], f"{operation} #{self._sequence}"
        what = f"{here} of {_ranks(self.names)}"
        others = [r for r in (peers or range(len(self.names))) if r != self.rank]
        try:
            self.store.set(f"stuck/{self.rank}", here)
            if not late:
                return RankFailed(me, f"{what}: a peer of rank {me} is gone ({cause})")
            absent = [self.names[r] for r in self._unset("stuck", others, ROLL_CALL)]
            if absent:
                who = f"no sign of {_ranks(absent)} within {self.timeout:g} s"
                return RankFailed(absent[0], f"{what}: {who} ({cause})")
            stuck = [f"rank {self.names[r]} in {self.store.get(f'stuck/{r}').decode()}" for r in others]
            return RankFailed(me, f"{what}: not done after {self.timeout:g} s, with {', '.join(stuck)}")
        except RuntimeError:
            return RankFailed(me, f"{what}: a peer of rank {me} is gone or late ({cause})")

    def _unset(self, key: str, ranks: Sequence[int], patience: float = 0.0) -> list[int]:
        """The ranks that have not set `key` after `patience` seconds; none where the store is gone."""
        with suppress(RuntimeError):
            if patience:
                with suppress(RuntimeError):  # the wait ends thus where some have not
                    self.store.wait([f"{key}/{r}" for r in ranks], timedelta(seconds=patience))
            return [r for r in ranks if not self.store.check([f"{key}/{r}"])]
        return []


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def first_line(error: Exception) -> str:
    """What PyTorch says, without gloo's source file and its advice."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.rpartition("] ")[2].split(". This is typically")[0] if ".cc:" in text else text
