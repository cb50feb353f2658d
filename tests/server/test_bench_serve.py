"""`serried bench serve` against our server, and against one that answers as llama-cpp-python's does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from fakes import FakeEngine, served

from serried.bench.serve import ServeBench
from serried.bench.workload import Workload
from serried.cli.main import main
from serried.errors import InputError, SerriedError

TOKENS = 6


class LlamaCpp(BaseHTTPRequestHandler):
    """No usage in a stream, an end that is a piece of its own; a request is cut off where `cut` says so."""

    protocol_version = "HTTP/1.1"
    cut = frozenset[int]()
    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        body = b'{"object": "list", "data": [{"id": "smol", "object": "model", "owned_by": "me", "permissions": []}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        number = len(self.asked)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for _ in range(TOKENS):
            self._piece("word", None)
            time.sleep(0.01)
            if number in self.cut:
                self.close_connection = True
                return
        self._piece("", "length")
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _piece(self, text: str, reason: str | None) -> None:
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": reason}
        self._chunk(b"data: " + json.dumps({"object": "text_completion", "choices": [choice]}).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def llama_cpp(cut: frozenset[int] = frozenset()) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    handler = type("Handler", (LlamaCpp,), {"cut": cut, "asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


def measured(url: str, most: int = 2, **options: Any) -> dict[str, Any]:
    bench = ServeBench(url, None, Workload(4, 8, TOKENS), most, {"ttft": 5.0}, **options)
    return bench.run(lambda done, total: None)


def test_ours() -> None:
    engine = FakeEngine(say=lambda prompt, index: [5] * 50)
    engine.delay = 0.005
    with served(engine, api_key=("k",)) as server:
        found = measured(f"{server.url}/v1", api_key="k")
        assert (found["model"], found["completed"], found["failed"]) == ("tiny", 4, 0)
        assert found["output_tokens"] == 4 * TOKENS
        assert found["input_tokens"] == sum(len(each["prompt"]) for each in engine.asked[1:])
        assert found["mean_tpot_ms"] >= 5 and found["mean_ttft_ms"] < found["mean_e2el_ms"]
        assert found["goodput_requests_per_s"] == found["requests_per_s"]
        assert all(each["params"].ignore_eos and each["params"].temperature == 0 for each in engine.asked)
        with pytest.raises(InputError, match="/v1/models does not answer"):
            measured(server.url)


def test_a_server_that_counts_nothing() -> None:
    """Its tokens are its pieces, without the last one, which only says that it is the last."""
    with llama_cpp() as (url, asked):
        found = measured(url)
    assert (found["model"], found["completed"], found["output_tokens"]) == ("smol", 4, 4 * TOKENS)
    assert found["input_tokens"] is None and found["total_tokens_per_s"] is None
    assert found["mean_tpot_ms"] == pytest.approx(found["mean_itl_ms"])
    assert len(asked) == 5 and asked[0]["max_tokens"] == TOKENS


def test_a_server_that_cuts_answers_off() -> None:
    with llama_cpp(cut=frozenset({3, 4})) as (url, _):
        found = measured(url)
    assert (found["completed"], found["failed"], found["output_tokens"]) == (2, 2, 2 * TOKENS)
    assert "payload is not completed" in found["first_error"]
    with llama_cpp(cut=frozenset(range(9))) as (url, _), pytest.raises(SerriedError, match="no request has succeeded"):
        measured(url)


def test_the_command_prints_what_is_not_known_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    with llama_cpp() as (url, _):
        words = ["bench", "serve", "--base-url", url, "--num-prompts", "2", "--input-len", "4", "--output-len", "6"]
        assert main(words) == 0
        table = capsys.readouterr().out
        assert main([*words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["input_tokens"] is None and figures["output_tokens"] == 2 * TOKENS
    assert "None" not in table
