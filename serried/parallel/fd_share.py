"""One memfd for ranks that are nobody's children (torchrun): rank 0 makes it and hands it to the others.

It travels over a Unix socket whose abstract address, random and without a file, is in the store that the ranks
already have. Only processes of the same user get it, or take it.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from serried.errors import RankFailed

KEY = "serried/memfd"
HELLO = struct.Struct(">I")  # the rank of who asks
CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


class Store(Protocol):
    """What torch.distributed's stores are: get waits until the key is set."""

    def set(self, key: str, value: bytes, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...


def share_memfd(store: Store, rank: int, size: int, timeout: float = 60.0) -> int:
    """A descriptor of a new memfd, the same one on every rank; for the caller to close.

    store: fresh for this world. Raises RankFailed where a rank does not come in `timeout` seconds, or is not on this
    machine.
    """
    deadline = time.monotonic() + timeout
    if rank == 0:
        return _hand_out(store, size, deadline, timeout)
    try:
        name = store.get(KEY)
    except Exception as error:
        raise RankFailed(0, f"rank {rank} waited for its shared memory: {error}") from error
    return _fetch(name, rank, deadline, timeout)


def _hand_out(store: Store, size: int, deadline: float, timeout: float) -> int:
    name = b"serried-" + secrets.token_hex(16).encode()
    waiting = set(range(1, size))
    fd = os.memfd_create("serried-shm")
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(b"\0" + name)
            listener.listen(size)
            store.set(KEY, name)
            while waiting:
                listener.settimeout(max(0.001, deadline - time.monotonic()))
                peer, _ = listener.accept()
                with peer, _ignoring_broken_peers():
                    waiting.discard(_serve(peer, fd, deadline))
    except TimeoutError:
        os.close(fd)
        who = ", ".join(map(str, sorted(waiting)))
        what = f"did not fetch the shared memory within {timeout:g} s (waited for: {who})"
        raise RankFailed(min(waiting), what) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _serve(peer: socket.socket, fd: int, deadline: float) -> int:
    """Give the memfd to who has called, and wait until it is there; the rank that it is."""
    _require_own_user(peer)
    peer.settimeout(max(0.001, min(5.0, deadline - time.monotonic())))
    (rank,) = HELLO.unpack(_exactly(peer, HELLO.size))
    socket.send_fds(peer, [b"m"], [fd])
    _exactly(peer, 1)
    return int(rank)


def _fetch(name: bytes, rank: int, deadline: float, timeout: float) -> int:
    with socket.socket(socket.AF_UNIX) as link:
        try:
            link.settimeout(max(0.001, deadline - time.monotonic()))
            link.connect(b"\0" + name)
            _require_own_user(link)
            link.sendall(HELLO.pack(rank))
            _, fds, _, _ = socket.recv_fds(link, 1, 1)
            if not fds:
                raise ConnectionError("rank 0 hung up")
            os.set_inheritable(fds[0], False)
            link.sendall(b"k")
        except (ConnectionRefusedError, FileNotFoundError) as error:
            reason = f"cannot reach rank 0's socket ({error}): shared memory needs all ranks on one machine"
            raise RankFailed(rank, reason) from error
        except TimeoutError:
            raise RankFailed(0, f"did not hand rank {rank} the shared memory within {timeout:g} s") from None
        except OSError as error:
            raise RankFailed(0, f"did not hand rank {rank} the shared memory: {error}") from error
    return fds[0]


def _require_own_user(link: socket.socket) -> None:
    """An abstract address has no permissions: anybody on the machine may listen there, or call."""
    _, uid, _ = CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if uid != os.geteuid():
        raise PermissionError(f"the other end belongs to user {uid}")


def _exactly(link: socket.socket, size: int) -> bytes:
    data = link.recv(size, socket.MSG_WAITALL)
    if len(data) != size:
        raise ConnectionError("hung up")
    return data


@contextmanager
def _ignoring_broken_peers() -> Iterator[None]:
    """Who calls and then hangs up, stalls or is somebody else does not stop the others."""
    try:
        yield
    except OSError:
        return
