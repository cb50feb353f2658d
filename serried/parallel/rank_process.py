"""One child rank, seen from rank 0: its process, its output, what it sends and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import NamedTuple

import msgspec

from serried.errors import INPUT_ERRORS, RankFailed
from serried.parallel.link import CHUNK, ChildArgs, FrameReader, Kind, Report

PATIENCE = 1.0  # seconds for a process whose link is closed to leave its status and its last output
TAIL = 100  # lines of a rank's output that explain its death


class Verdict(NamedTuple):
    """What is known against a rank, and how much weight it has (the lowest grade is believed)."""

    grade: int
    error: RankFailed


RAISED, DIED, BLAMED, HEARSAY = range(4)


def judge(error: RankFailed, witness: int) -> Verdict:
    """Weigh a RankFailed that a rank met in a collective: one that names another rank is worth more."""
    return Verdict(BLAMED if error.rank != witness else HEARSAY, error)


class RankProcess:
    """One child rank, seen from rank 0."""

    def __init__(self, module: str, rank: int, size: int, fds: tuple[int, int], env: Mapping[str, str]) -> None:
        """fds: the death pipe and the store, both inherited. Raises RankFailed where it cannot be started."""
        self.rank = rank
        self.is_ready = self.is_gone = False
        self.inbox: deque[bytes] = deque()
        self._report: Report | None = None
        self._reader = FrameReader()
        self._tail: deque[str] = deque(maxlen=TAIL)
        self.socket, theirs = socket.socketpair()
        args = ChildArgs(rank, size, theirs.fileno(), *fds, os.getpid())
        started: Future[subprocess.Popen[bytes]] = Future()
        self._pump = threading.Thread(
            target=_start_and_pump, args=(module, args, env, started, self._tail), daemon=True
        )
        self._pump.start()
        try:
            self.process = started.result()
        except OSError as error:
            self.socket.close()
            raise RankFailed(rank, f"could not be started: {error}") from error
        finally:
            theirs.close()

    def read(self) -> None:
        """Take in what the rank has sent, without waiting."""
        try:
            data = self.socket.recv(CHUNK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        self.is_gone = not data
        for kind, body in self._reader.feed(data):
            if kind is Kind.READY:
                self.is_ready = True
            elif kind is Kind.REPORT:
                self._report = msgspec.msgpack.decode(body, type=Report)
            else:
                self.inbox.append(body)

    def verdict(self) -> Verdict | None:
        """What this rank has to say for itself, if anything went wrong."""
        report = self._report
        if report is None:
            return Verdict(DIED, self._death()) if self.is_gone else None
        if report.blames is None:
            reason = f"{report.type}: {report.message}"
            kind = INPUT_ERRORS.get(report.type)
            error = RankFailed(self.rank, reason, report.traceback, kind(report.message) if kind else None)
            return Verdict(RAISED, error)
        return judge(RankFailed(report.blames, report.message, report.traceback), self.rank)

    def end(self, deadline: float) -> None:
        """Wait for the process until the deadline, then let the next, harsher step come."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return

    def finish(self) -> None:
        """After the process has ended: the last of its output, and its socket."""
        self._pump.join(PATIENCE)
        self.socket.close()

    def _death(self) -> RankFailed:
        self.end(time.monotonic() + PATIENCE)  # the link is closed a moment before the status is there
        status = self.process.returncode
        if status is None:
            return RankFailed(self.rank, "closed its link to rank 0")
        when = "" if self.is_ready else " before it was ready"
        if status < 0:
            name = next((s.name for s in signal.Signals if s == -status), str(-status))
            hint = " (out of memory, or by hand)" if name == "SIGKILL" else ""
            return RankFailed(self.rank, f"killed by {name}{when}{hint}")
        self._pump.join(PATIENCE)
        return RankFailed(self.rank, f"exited with status {status}{when}", "".join(self._tail))


def _start_and_pump(
    module: str,
    args: ChildArgs,
    env: Mapping[str, str],
    started: Future[subprocess.Popen[bytes]],
    tail: deque[str],
) -> None:
    """Start a rank, then copy its output to our stderr, line by line, each with its rank.

    One thread does both, because PR_SET_PDEATHSIG fires when the thread that started the child ends.
    """
    try:
        process = subprocess.Popen(
            # -P: a file in the user's current directory must not shadow a module of ours
            [sys.executable, "-P", "-m", module, *args.to_argv()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=args.fds,
            start_new_session=True,  # a Ctrl-C or a closed terminal reaches rank 0 alone, which decides
        )
    except BaseException as error:
        started.set_exception(error)
        return
    started.set_result(process)
    if process.stdout is None:
        return
    with process.stdout as output:
        for raw in iter(lambda: output.readline(CHUNK), b""):
            line = raw.decode(errors="replace").rstrip("\n") + "\n"
            tail.append(line)
            try:
                sys.stderr.write(f"[rank {args.rank}] {line}")
            except (AttributeError, OSError, ValueError):
                continue  # our stderr is closed or was never there: go on reading, or the rank would block
    process.wait()
