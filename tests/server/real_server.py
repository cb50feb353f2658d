"""`serried serve` as a process of its own: its address, its processes, its figures, and what it leaves behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
OPTIONS = ("--backend", "native", "--threads-per-rank", "1", "--block-size", "8", "--no-access-log")
PATIENCE = 120.0  # seconds: it ends a test that would hang, and measures nothing


def until(holds: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """What `holds` gives once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.01)
    return found


class RealServer:
    """A server that is starting, or has started. folder: its directory for temporary files."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, log: Path) -> None:
        self.process, self.folder, self._log = process, folder, log

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def url(self) -> str:
        """Where it listens, which it says before it has loaded anything."""
        return str(until(lambda: self._said(r"listening on (http://127\.0\.0\.1:\d+)")))

    def _said(self, pattern: str) -> str | None:
        if self.process.poll() is not None:
            raise AssertionError(f"it has ended: {self.log}")
        found = re.search(pattern, self.log)
        return found[1] if found else None

    def wait_ready(self) -> None:
        """Until it answers."""
        until(lambda: self._said(r"(ready at)") and httpx.get(f"{self.url}/ready").status_code == 200)

    @property
    def children(self) -> list[int]:
        """All processes that it has started, and theirs: rank 0 first."""
        return descendants(self.process.pid)

    @property
    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        return [pid for pid in self.children if b"serried.engine." in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = httpx.get(f"{self.url}/stats").json()["stats"]
        return stats

    def wait_idle(self) -> dict[str, Any]:
        """Until nothing runs or waits and no block is held; the figures then.

        The latest figures may be from before the latest requests: one more, of one token, brings new ones.
        """
        before = self.stats()["generated_tokens"]
        self.post("/v1/completions", prompt=[0], max_tokens=1)

        def idle() -> dict[str, Any] | None:
            stats = self.stats()
            busy = stats["running"] or stats["waiting"] or stats["blocks_used"]
            return None if busy or stats["generated_tokens"] == before else stats

        found: dict[str, Any] = until(idle)
        return found

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE)
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        return reply

    def end(self, signal_number: int) -> int:
        """Send a signal and wait; the exit status. Nothing may be left: no process, no file."""
        children = self.children
        self.process.send_signal(signal_number)
        status = self.process.wait(PATIENCE)
        until(lambda: not any(Path(f"/proc/{child}").exists() for child in children), 10)
        assert list(self.folder.iterdir()) == []
        return status


@contextmanager
def serving(folder: Path, *words: str, wait: bool = True, beneath: Path | None = None) -> Iterator[RealServer]:
    """A server with its temporary files in a folder of its own, with a path that sockets fit in."""
    temporary, log = Path(tempfile.mkdtemp(prefix="t-", dir=beneath)), folder / "log"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "serried", "serve", "--port", "0", *words]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stderr=file, env={**os.environ, "TMPDIR": str(temporary)})
    server = RealServer(process, temporary, log)
    try:
        if wait:
            server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            process.kill()  # its ranks end with it
        process.wait()
        shutil.rmtree(temporary, ignore_errors=True)


def descendants(pid: int) -> list[int]:
    """The processes below one, the oldest first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in sorted(parents.get(parent, []))]
        found += new
    return found
