"""The server's log: every line of it comes, and nobody who has to answer waits for whoever reads it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from serving import address, process, wait_until_ready
from tiny_models import Models

from serried.server import log
from serried.server.log import ThreadHandler


@contextmanager
def stderr_is_a_pipe() -> Iterator[int]:
    """The end of it that reads. In the test itself: pytest sets sys.stderr anew after the fixtures."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    before = sys.stderr
    try:
        with os.fdopen(writing, "w") as sys.stderr:
            yield reading
    finally:
        sys.stderr = before
        os.close(reading)


def read(pipe: int, end: str, seconds: float = 20) -> str:
    """What comes, until it ends so."""
    text, deadline = b"", time.monotonic() + seconds
    while not text.endswith(end.encode()):
        assert time.monotonic() < deadline, text[-200:]
        try:
            text += os.read(pipe, 1 << 16)
        except BlockingIOError:
            time.sleep(0.001)
    return text.decode()


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("serried", logging.INFO, __file__, 1, text, None, None)


def test_all_lines_in_order() -> None:
    with stderr_is_a_pipe() as pipe:
        handler = ThreadHandler()
        for number in range(100):
            handler.emit(record(f"line {number}\ud800"))
        handler.flush()
        assert read(pipe, "99\\ud800\n").splitlines() == [rf"line {number}\ud800" for number in range(100)]
        handler.close()


def test_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever logs does not wait; what is lost is counted, and said once somebody reads again."""
    monkeypatch.setattr(log, "MOST_LINES", 50)
    monkeypatch.setattr(log, "_FLUSH_SECONDS", 0.1)
    with stderr_is_a_pipe() as pipe:
        handler, asked = ThreadHandler(), 0
        while handler._lost < 20:
            handler.emit(record(f"{asked}" + "x" * 1000))
            asked += 1
            time.sleep(0.001)
        handler.flush()
        assert 50 <= handler._written < handler._put < asked < 1000
        kept = read(pipe, f"{handler._put - 1}" + "x" * 1000 + "\n").splitlines()
        assert [line.rstrip("x") for line in kept] == [str(number) for number in range(handler._put)]
        lost = asked - handler._put
        handler.emit(record("at last"))
        assert read(pipe, "last\n") == f"{lost} lines of this log are lost: nobody read stderr\nat last\n"
        handler.close()


def test_stderr_is_closed() -> None:
    with stderr_is_a_pipe():
        handler = ThreadHandler()
        sys.stderr.close()
        handler.emit(record("to nobody"))
        handler.flush()
        assert handler._written == 1
        handler.close()


def test_a_server_whose_stderr_nobody_reads(tiny: Models) -> None:
    """It answers on and ends well: a terminal stopped by Ctrl-S stops no service."""
    with process(str(tiny.directory("split-text")), "-tp", "1", "--threads-per-rank", "1") as started:
        url = address(started)
        wait_until_ready(url, started)
        with httpx.Client(base_url=url, timeout=20) as client:
            for _ in range(1500):  # some 140 KB of lines; a pipe takes 64
                assert client.get("/v1/models").status_code == 200
        started.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert started.wait(60) == 0
        assert time.monotonic() - began < 30
