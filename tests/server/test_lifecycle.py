"""A server's end by a signal, in every phase; two of them side by side; one whose rank is killed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from real_server import OPTIONS, RealServer, serving, until
from tiny_models import TEXT, Models

LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "temperature": 0.9, "seed": 3}


@pytest.fixture(scope="module")
def model(tiny: Models) -> str:
    return str(tiny.directory("split-text"))


@pytest.fixture(autouse=True)
def nothing_in_dev_shm() -> Any:
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208
    yield
    until(lambda: not set(os.listdir("/dev/shm")) - before, 10)  # noqa: PTH208


def stream(
    server: RealServer, seen: threading.Event | None = None, start: threading.Barrier | None = None, **body: Any
) -> tuple[str, str | None]:
    """The text of a streamed completion, and why it ended. start: asks together with the others that wait there."""
    text, reason = "", None
    asked = {"prompt": TEXT[0], "stream": True, **LONG, **body}
    with httpx.Client(timeout=60) as client:  # made before the barrier: that is what takes long
        if start is not None:
            start.wait(60)
        with client.stream("POST", f"{server.url}/v1/completions", json=asked) as response:
            assert response.status_code == 200, response.read()
            for block in b"".join(_told(response, seen)).split(b"\n\n"):
                if block.startswith(b"data: {"):
                    event = json.loads(block[6:])
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        text, reason = text + choice["text"], choice["finish_reason"] or reason
    return text, reason


def _told(response: httpx.Response, seen: threading.Event | None) -> Any:
    for data in response.iter_bytes():
        if seen is not None and b"data:" in data:
            seen.set()
        yield data


def test_sigterm_lets_those_that_run_finish(model: str, tmp_path: Path) -> None:
    slow = (*OPTIONS, "--backend", "torch", "--max-num-seqs", "1")  # or all are answered before the last one has asked
    with serving(tmp_path, model, "-tp", "2", *slow) as server, ThreadPoolExecutor(9) as pool:
        url, seen, children = server.url, threading.Event(), server.children
        alone = stream(server)
        start = threading.Barrier(8)
        asked = [pool.submit(stream, server, seen, start) for _ in range(8)]
        assert seen.wait(60)
        until(lambda: server.stats()["running"] + server.stats()["waiting"] == 8)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "SIGTERM" in server.log)
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert httpx.get(f"{url}/ready").status_code == 503
        assert httpx.get(f"{url}/health").status_code == 200
        assert alone[1] == "length"
        assert [job.result() for job in asked] == [alone] * 8
        assert server.process.wait(60) == 0
        until(lambda: not any(Path(f"/proc/{child}").exists() for child in children), 10)
        assert list(server.folder.iterdir()) == []


def test_sigterm_does_not_wait_for_ever(model: str, tmp_path: Path) -> None:
    """Not longer than --drain-timeout, and not at all where it comes twice."""
    with serving(tmp_path, model, "--drain-timeout", "0.1", *OPTIONS) as server:
        hold = {"prompt": TEXT[0], "n": 60, **LONG}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, f"{server.url}/v1/completions", json=hold, timeout=60)
            until(lambda: server.stats()["running"])
            assert server.end(signal.SIGTERM) == 0
            assert asked.exception() or asked.result()


@pytest.mark.parametrize(
    ("number", "phase"),
    [(signal.SIGINT, "listening"), (signal.SIGINT, "ranks"), (signal.SIGINT, "ready"), (signal.SIGTERM, "ranks")],
)
def test_a_signal_leaves_nothing(model: str, tmp_path: Path, number: int, phase: str) -> None:
    with serving(tmp_path, model, "-tp", "2", *OPTIONS, wait=False) as server:
        assert server.url
        if phase == "ranks":
            until(lambda: len(server.children) == 2)
        elif phase == "ready":
            server.wait_ready()
            assert len(server.children) == 2
        assert server.end(number) == (130 if number == signal.SIGINT else 0), server.log


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [2, pytest.param(40, marks=pytest.mark.soak)])
def test_an_interrupt_at_any_time_leaves_nothing(model: str, tmp_path: Path, count: int) -> None:
    rng = np.random.default_rng(count)
    for each in range(count):
        with serving(tmp_path / str(each), model, "-tp", "2", *OPTIONS, wait=False) as server:
            assert server.url
            time.sleep(rng.uniform(0, 2.5))
            assert server.end(signal.SIGINT) == 130, server.log


def test_two_at_once(model: str, tmp_path: Path) -> None:
    words = (model, "-tp", "2", *OPTIONS)
    with serving(tmp_path / "a", *words, wait=False) as one, serving(tmp_path / "b", *words, wait=False) as other:
        one.wait_ready()
        other.wait_ready()
        with ThreadPoolExecutor(4) as pool:
            texts = [job.result() for job in [pool.submit(stream, server) for server in (one, other) * 2]]
            assert len(set(texts)) == 1
            seen = threading.Event()
            asked = pool.submit(stream, other, seen)
            assert seen.wait(60)
            assert one.end(signal.SIGINT) == 130
            assert asked.result() == texts[0]
        assert stream(other) == texts[0]
        assert other.stats()["restarts"] == 0
        assert other.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_rank_is_killed_while_it_serves(model: str, tmp_path: Path, victim: int) -> None:
    """Who asks sees a pause, then the very text; /ready says 503 meanwhile; who asks meanwhile is answered later."""
    with serving(tmp_path, model, "-tp", "2", *OPTIONS) as server, ThreadPoolExecutor(8) as pool:
        alone, seen = stream(server), threading.Event()
        asked = [pool.submit(stream, server, seen) for _ in range(3)]
        assert seen.wait(60)
        os.kill(server.children[victim], signal.SIGKILL)
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        assert httpx.get(f"{server.url}/health").status_code == 200
        asked += [pool.submit(stream, server) for _ in range(3)]
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
        assert [job.result() for job in asked] == [alone] * 6
        assert server.wait_idle()["restarts"] == 1
        assert f"rank {victim}: killed by SIGKILL" in server.log
        assert server.end(signal.SIGTERM) == 0


def test_what_it_says(model: str, tmp_path: Path) -> None:
    """What is loaded, what each rank gets, how many fit, and a command to paste, which works."""
    with serving(tmp_path, model, "-tp", "2", "--kv-cache-memory", "1000000", *OPTIONS) as server:
        for said in ("2 ranks of 1 thread", "rank 0: 0.1 M parameters", "rank 1: ", " query heads, 1 KV heads"):
            assert said in server.log
        assert "maximum concurrency for 256-token requests" in server.log
        (command,) = [line for line in server.log.splitlines() if line.startswith("curl ")]
        program, url, *words = shlex.split(command)
        options = dict(zip(words[::2], words[1::2], strict=True))
        assert program == "curl" and set(options) == {"-H", "-d"}
        name, _, value = options["-H"].partition(": ")
        done = httpx.post(url, content=options["-d"], headers={name: value}, timeout=60)
        assert done.status_code == 200, done.text
        assert done.json()["choices"][0]["message"]["role"] == "assistant"


def test_a_long_path_for_temporary_files(model: str, tmp_path: Path) -> None:
    """Sockets have short names: they go elsewhere."""
    long = tmp_path / ("a" * 100)
    long.mkdir()
    with serving(tmp_path, model, *OPTIONS, beneath=long) as server:
        assert httpx.get(f"{server.url}/ready").status_code == 200
