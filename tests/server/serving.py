"""`serried serve` as a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]


@contextmanager
def process(*words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "serried", "serve", "--port", "0", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as started:
        try:
            yield started
        finally:
            if started.poll() is None:
                started.terminate()
            started.communicate(timeout=120)


def address(started: subprocess.Popen[str]) -> str:
    """Where it listens, which it says before it has loaded anything."""
    assert started.stderr is not None
    for line in started.stderr:
        if found := re.search(r"listening on (https?://127\.0\.0\.1:\d+)", line):
            return found[1]
    raise AssertionError("it does not listen")


def wait_until_ready(url: str, started: subprocess.Popen[str], key: str = "") -> set[tuple[int, int]]:
    """Wait for /ready; what it and /health have answered meanwhile."""
    deadline = time.monotonic() + 120
    seen = set()
    headers = {"x-api-key": key} if key else {}
    while (status := httpx.get(f"{url}/ready", headers=headers).status_code) != 200:
        seen.add((status, httpx.get(f"{url}/health").status_code))
        assert time.monotonic() < deadline and started.poll() is None
        time.sleep(0.05)
    return seen
