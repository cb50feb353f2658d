"""A PyTorch process group as an object: opened, waited for with a deadline, and asked who is to blame.

Nothing is registered in torch.distributed: several engines can live in one process, and the user's own
process groups are left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from serried.errors import InputError, RankFailed

LATE = 0.9  # of the deadline: a failure after that is a peer that did not come, before it one that went away
ROLL_CALL = 1.0  # seconds that ranks get to say that they, too, are stuck


class TorchGroup:
    """gloo for device "cpu", NCCL for "cuda". `names`: the members' ranks in the world, for error messages.

    `timeout` (seconds) is the deadline of joining and of every operation. `loopback`: bind to 127.0.0.1 only.
    Raises RankFailed where a rank does not join.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        names: Sequence[int],
        device: torch.device,
        timeout: float,
        loopback: bool,
    ) -> None:
        self.store, self.rank, self.names = store, rank, tuple(names)
        self.device, self.timeout, self.loopback = device, timeout, loopback
        self._sequence = 0
        self._group: Any = self._join()

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
            if self.device.type == "cuda":
                self._await_device(work, start + self.timeout)
            work.wait()
        except RuntimeError as error:
            late = time.monotonic() - start > LATE * self.timeout
            raise self._failure(operation, first_line(error), late, peers) from error

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            group.abort()  # shutdown would wait for a peer that is gone

    def _join(self) -> Any:
        size = len(self.names)
        try:
            self.store.set_timeout(timedelta(seconds=self.timeout))
            self.store.set(f"here/{self.rank}", "")
            return self._gloo(size) if self.device.type == "cpu" else self._nccl(size)
        except RuntimeError as error:
            absent = [self.names[r] for r in self._unset("here", range(size))]
            who = f"; no sign of {_ranks(absent)}" if absent else ""
            reason = f"joining the group of {_ranks(self.names)} within {self.timeout:g} s{who}"
            culprit = absent[0] if absent else self.names[self.rank]
            raise RankFailed(culprit, f"{reason} ({first_line(error)})") from error

    def _gloo(self, size: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=self.timeout)
        options._devices = [gloo.create_device(hostname="127.0.0.1") if self.loopback else gloo.create_default_device()]
        return gloo(self.store, self.rank, size, options)

    def _nccl(self, size: int) -> Any:
        nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
        if nccl is None:
            raise InputError("this build of PyTorch has no NCCL: install one for CUDA, or use the CPU")
        options = nccl.Options()
        # NCCL's own watchdog ends the whole process: it must not be the first to act
        options._timeout = timedelta(seconds=2 * self.timeout)
        return nccl(self.store, self.rank, size, options)

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
