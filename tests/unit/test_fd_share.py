"""One memfd for ranks that are nobody's children."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serried.errors import RankFailed
from serried.parallel.fd_share import KEY, share_memfd


class Table:
    """A store for the threads of one process, like torch.distributed's."""

    def __init__(self, timeout: float = 10.0) -> None:
        self.timeout = timeout
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, self.timeout):
                raise RuntimeError("wait timeout")
            return self._values[key]


def in_threads(*bodies: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return [future.result() for future in [pool.submit(body) for body in bodies]]


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_get_the_same_file(size: int) -> None:
    before, store = open_fds(), Table()

    def rank(r: int) -> Callable[[], int]:
        def body() -> int:
            time.sleep(0.02 * ((r * 3) % size))
            return share_memfd(store, r, size, 10)

        return body

    fds = in_threads(*[rank(r) for r in range(size)])
    assert len(set(fds)) == size
    assert len({os.fstat(fd).st_ino for fd in fds}) == 1
    assert not any(os.get_inheritable(fd) for fd in fds)
    for fd in fds:
        os.close(fd)
    assert open_fds() == before
    assert size == 1 or store.get(KEY).decode() not in Path("/proc/net/unix").read_text()


def test_a_rank_that_does_not_come() -> None:
    before, store = open_fds(), Table()

    def first() -> None:
        with pytest.raises(RankFailed, match=r"rank 2: did not fetch .* within 0.5 s \(waited for: 2\)"):
            share_memfd(store, 0, 3, 0.5)

    os.close(in_threads(lambda: share_memfd(store, 1, 3, 10), first)[0])
    assert open_fds() == before


def test_rank_0_does_not_come() -> None:
    with pytest.raises(RankFailed, match="rank 0: rank 1 waited for its shared memory: wait timeout"):
        share_memfd(Table(0.1), 1, 2, 0.1)


def test_rank_0_is_elsewhere() -> None:
    store = Table()
    store.set(KEY, b"serried-nobody")
    with pytest.raises(RankFailed, match="needs all ranks on one machine"):
        share_memfd(store, 1, 2, 1)


def test_rank_0_stalls() -> None:
    store, before = Table(), open_fds()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(b"\0serried-test-stalled")
        listener.listen()
        store.set(KEY, b"serried-test-stalled")
        with pytest.raises(RankFailed, match=r"rank 0: did not hand rank 1 the shared memory within 0.3 s"):
            share_memfd(store, 1, 2, 0.3)
    assert open_fds() == before


def test_callers_that_hang_up_or_stall_do_not_stop_the_others() -> None:
    store = Table()

    def noise() -> None:
        name = b"\0" + store.get(KEY)
        for word in (b"", b"\0\0", b"\0\0\0\x09"):
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(name)
                link.sendall(word)

    def late() -> int:
        store.get(KEY)
        time.sleep(0.2)
        return share_memfd(store, 1, 2, 10)

    fds = in_threads(lambda: share_memfd(store, 0, 2, 10), late, noise)[:2]
    assert os.fstat(fds[0]).st_ino == os.fstat(fds[1]).st_ino
    for fd in fds:
        os.close(fd)


def test_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither gives the file to a process of somebody else, nor takes one from it."""
    store = Table()
    us = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(share_memfd, store, 0, 2, 0.5)
        with pytest.raises(RankFailed, match="rank 0: did not hand rank 1 the shared memory: the other end belongs"):
            share_memfd(store, 1, 2, 0.5)
        with pytest.raises(RankFailed, match="did not fetch"):
            first.result()


SCRIPT = """
import os, sys, time
from pathlib import Path
from serried.parallel.fd_share import share_memfd

class Folder:
    def __init__(self, path): self.path = path
    def file(self, key): return self.path / key.replace("/", "-")
    def set(self, key, value):
        self.file("new").write_bytes(value)
        self.file("new").rename(self.file(key))
    def get(self, key):
        while not self.file(key).exists(): time.sleep(0.01)
        return self.file(key).read_bytes()

rank, size = int(sys.argv[2]), int(sys.argv[3])
fd = share_memfd(Folder(Path(sys.argv[1])), rank, size, 20)
os.pwrite(fd, bytes([65 + rank]), rank)
while len(os.pread(fd, 9, 0).replace(bytes(1), b"")) < size: time.sleep(0.01)
print(os.pread(fd, 9, 0).decode())
"""


def test_between_processes(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, tmp_path, str(rank), "3"],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(3)
    ]
    assert [rank.communicate(timeout=30)[0] for rank in ranks] == ["ABC\n"] * 3
