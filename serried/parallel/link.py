"""The control link between the process of rank 0 and each other rank: frames, and the child's end.

A frame is a kind (1 byte), a length (8 bytes, big-endian) and that many bytes, over a Unix socket pair.
Nothing is ever unpickled.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from types import TracebackType

import msgspec

from serried.errors import InputError, RankFailed

HEADER = struct.Struct(">BQ")
CHUNK = 1 << 20
PR_SET_PDEATHSIG = 1


class Kind(IntEnum):
    """What a frame is."""

    DATA = 0
    READY = 1
    REPORT = 2


class Report(msgspec.Struct, frozen=True):
    """How a rank ended. `blames`: the rank that a RankFailed names, where the error is hearsay of a peer."""

    type: str
    message: str
    traceback: str
    blames: int | None = None


class ParentGone(SystemExit):
    """The process of rank 0 has closed the link or died: unless caught, the rank ends quietly."""

    def __init__(self) -> None:
        super().__init__(0)


def pack_frame(kind: Kind, body: bytes) -> bytes:
    return HEADER.pack(kind, len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[tuple[Kind, bytes]]:
        """The frames that are complete with these bytes, oldest first."""
        self._pending += data
        frames = []
        while len(self._pending) >= HEADER.size:
            kind, length = HEADER.unpack_from(self._pending)
            end = HEADER.size + length
            if len(self._pending) < end:
                break
            frames.append((Kind(kind), bytes(self._pending[HEADER.size : end])))
            del self._pending[:end]
        return frames


@dataclass(frozen=True)
class ChildArgs:
    """What a rank gets on its command line: who it is, and the numbers of the descriptors it inherits."""

    rank: int
    size: int
    control_fd: int
    death_fd: int
    store_fd: int
    parent_pid: int

    @property
    def fds(self) -> tuple[int, ...]:
        return self.control_fd, self.death_fd, self.store_fd

    def to_argv(self) -> list[str]:
        return [str(value) for value in astuple(self)]

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> ChildArgs:
        try:
            return cls(*map(int, argv))
        except (TypeError, ValueError):
            raise InputError("this module is a rank of Serried: it is started by rank 0, not by hand") from None


class ChildLink:
    """A child rank's end: rank, size, payload (bytes) and store_fd; frames to and from rank 0.

    As a context manager it reports what is raised inside to rank 0 and ends the process with status 1.
    """

    def __init__(self, args: ChildArgs) -> None:
        self.rank, self.size, self.store_fd = args.rank, args.size, args.store_fd
        self._socket = socket.socket(fileno=args.control_fd)
        self._reader = FrameReader()
        self._inbox: deque[bytes] = deque()
        self.payload = self.recv()

    @classmethod
    def from_argv(cls, argv: Sequence[str] | None = None) -> ChildLink:
        """Tie this process to its parent, then receive the payload. Call it first, in the main thread."""
        args = ChildArgs.from_argv(sys.argv[1:] if argv is None else argv)
        for fd in args.fds:
            os.set_inheritable(fd, False)  # else a grandchild would keep a dead rank's link open
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what an interrupt means
        threading.Thread(target=_die_at_eof, args=(args.death_fd,), name="death-pipe", daemon=True).start()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != args.parent_pid:  # it died before prctl could take note
            raise ParentGone
        return cls(args)

    def ready(self) -> None:
        """Tell rank 0 that this rank is ready to work."""
        self._post(Kind.READY, b"")

    def report(self, error: BaseException) -> None:
        """Tell rank 0 what went wrong here, with the traceback; silent where rank 0 is gone."""
        text = "".join(traceback.format_exception(error))
        report = Report(type(error).__name__, str(error), text)
        if isinstance(error, RankFailed):
            report = Report(type(error).__name__, error.reason, text, error.rank)
        try:
            self._post(Kind.REPORT, msgspec.msgpack.encode(report))
        except ParentGone:
            return

    def send(self, frame: bytes) -> None:
        """Send a frame to rank 0, which takes it with RankProcesses.recv."""
        self._post(Kind.DATA, frame)

    def recv(self) -> bytes:
        """The next frame from rank 0; waits as long as it lives. Raises ParentGone at the end of the link."""
        while not self._inbox:
            try:
                data = self._socket.recv(CHUNK)
            except ConnectionResetError:
                data = b""
            if not data:
                raise ParentGone
            self._inbox += [body for _, body in self._reader.feed(data)]
        return self._inbox.popleft()

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> ChildLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.report(error)
            self.close()
            raise SystemExit(1) from error
        self.close()

    def _post(self, kind: Kind, body: bytes) -> None:
        try:
            self._socket.sendall(pack_frame(kind, body))
        except (BrokenPipeError, ConnectionResetError):
            raise ParentGone from None


def _die_at_eof(fd: int) -> None:
    """End this process, whatever its main thread is stuck in, once the other end of the pipe is closed."""
    os.read(fd, 1)  # nothing is ever written
    os._exit(1)
