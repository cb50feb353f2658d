"""`serried serve` as a process of its own, with a tiny model on two ranks: the answers of LLM, signals, failures."""

from __future__ import annotations

import json
import re
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import socket
from typing import Any

import httpx
import openai
import pytest
from certificates import certificate
from serving import address, process, wait_until_ready
from tiny_models import TEXT, Models

from serried import LLM, SamplingParams

OPTIONS = ["--dtype", "float32", "--backend", "torch", "--threads-per-rank", "1", "--block-size", "8"]


@pytest.fixture(scope="module")
def model(tiny: Models) -> Path:
    return tiny.directory("split-text")


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with process(str(model), "-tp", "2", "--served-model-name", "tiny", "--no-access-log", *OPTIONS) as started:
        url = address(started)
        assert wait_until_ready(url, started) == {(503, 200)}
        yield url, started


@pytest.fixture
def url(running: tuple[str, subprocess.Popen[str]]) -> Iterator[str]:
    """After each test nothing runs, and all blocks are free."""
    yield running[0]
    deadline = time.monotonic() + 10
    while True:
        stats = httpx.get(f"{running[0]}/stats").json()["stats"]
        if not stats["running"] and not stats["waiting"] and not stats["blocks_used"]:
            return
        assert time.monotonic() < deadline, stats
        time.sleep(0.05)


def post(url: str, path: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{url}{path}", json=body, timeout=120)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def test_the_answers_of_llm(url: str, model: Path) -> None:
    """Many at once, sampled with a seed, stopped by a string: the same text and scores as in one process."""
    fields: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 40, "stop": ["e "], "logprobs": 2}
    with LLM(str(model), dtype="float32", backend="torch", threads_per_rank=1, block_size=8) as llm:
        wanted = [output.outputs[0] for output in llm.generate(TEXT, SamplingParams(**fields))]
        chat = llm.chat([{"role": "user", "content": TEXT[0]}], SamplingParams(temperature=0, max_tokens=20))
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(post, url, "/v1/completions", prompt=text, **fields) for text in TEXT * 4]
        replies = [job.result()["choices"][0] for job in jobs]
    for number, reply in enumerate(replies):
        answer = wanted[number % len(TEXT)]
        assert (reply["text"], reply["finish_reason"]) == (answer.text, answer.finish_reason)
        own = [next(iter(scores.values())).logprob for scores in answer.logprobs or ()]
        assert reply["logprobs"]["token_logprobs"] == pytest.approx(own, abs=1e-5)
    reply = post(
        url, "/v1/chat/completions", messages=[{"role": "user", "content": TEXT[0]}], temperature=0, max_tokens=20
    )
    assert reply["choices"][0]["message"]["content"] == chat[0].outputs[0].text


def test_streams_of_several_samples(url: str) -> None:
    whole = post(url, "/v1/completions", prompt=TEXT[0], n=3, seed=1, temperature=1, max_tokens=30)
    texts = ["", "", ""]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", timeout=60) as client:
        asked: dict[str, Any] = {"model": "tiny", "prompt": TEXT[0], "n": 3, "seed": 1, "max_tokens": 30}
        for chunk in client.completions.create(**asked, temperature=1, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert texts == [choice["text"] for choice in whole["choices"]]


@pytest.mark.parametrize("seed", range(3))
def test_json_by_a_random_model(url: str, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "t", "schema": schema, "strict": True}}
    reply = post(
        url,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "x"}],
        response_format=wanted,
        temperature=1,
        seed=seed,
        max_tokens=200,
    )
    (choice,) = reply["choices"]
    if choice["finish_reason"] == "stop":  # a random model likes to write spaces
        value = json.loads(choice["message"]["content"])
        assert set(value) == {"a", "b"} and 0 <= value["a"] <= 99
    regex = post(url, "/v1/completions", prompt="x", guided_regex="(ab|cd){3}", temperature=1, seed=seed, max_tokens=30)
    assert re.fullmatch("(ab|cd){3}", regex["choices"][0]["text"])


def test_a_client_that_leaves(url: str) -> None:
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True, "ignore_eos": True, "max_tokens": 200}
    ) as response:
        next(response.iter_bytes())


def test_bad_input_reaches_nobody(url: str) -> None:
    bad: list[dict[str, Any]] = [
        {"bad_words": [" "], "allowed_token_ids": [5], "min_tokens": 3},
        {"prompt": [999999]},
        {"max_tokens": 10**9},
    ]
    for body in bad:
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", **body}).status_code in (200, 400)
    assert httpx.get(f"{url}/ready").status_code == 200


def test_options_in_a_file_and_in_the_environment(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS, keys, names and the queue's limit, each met by a client."""
    keyfile, certfile = certificate(tmp_path)
    options = {"model": str(model), "tensor-parallel-size": 2, "max-num-seqs": 1, "max-queued-requests": 1}
    options |= {"served-model-name": ["one", "two"], "ssl-keyfile": keyfile, "ssl-certfile": certfile}
    file = tmp_path / "serve.yaml"
    file.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items()))
    monkeypatch.setenv("SERRIED_API_KEY", "secret")
    with process("--config", str(file), *OPTIONS) as started:
        url = address(started)
        assert url.startswith("https://")
        http = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=certfile))
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", http_client=http, max_retries=50) as client:
            assert [card.id for card in client.models.list().data] == ["one", "two"]  # waits while it loads
            asked: dict[str, Any] = {"prompt": "x", "max_tokens": 40, "extra_body": {"ignore_eos": True}}
            once = client.with_options(max_retries=0)
            with ThreadPoolExecutor(8) as pool:
                jobs = [pool.submit(once.completions.create, model="two", **asked) for _ in range(8)]
                errors = [job.exception() for job in jobs]
            assert any(isinstance(error, openai.RateLimitError) for error in errors)
            for error in errors:
                assert error is None or isinstance(error, openai.RateLimitError)
            assert None in errors
            assert client.completions.create(model="one", **asked).usage.completion_tokens == 40  # type: ignore[union-attr]
            with pytest.raises(openai.AuthenticationError):
                once.with_options(api_key="wrong").models.list()


def test_an_end_by_signal(model: Path) -> None:
    """Ctrl-C and SIGTERM end it, its engine and its ranks; a stream that runs meanwhile ends too."""
    for number in (signal.SIGINT, signal.SIGTERM):
        with process(str(model), "-tp", "2", *OPTIONS) as started:
            url = address(started)
            while httpx.get(f"{url}/ready").status_code != 200:
                time.sleep(0.05)
            tasks = Path(f"/proc/{started.pid}/task").glob("*/children")
            children = [child for task in tasks for child in task.read_text().split()]
            assert children
            started.send_signal(number)
            started.communicate(timeout=120)
            assert started.returncode == (130 if number == signal.SIGINT else 0)
        for child in children:
            assert not Path(f"/proc/{child}").exists()


def test_what_cannot_be_loaded(tmp_path: Path, model: Path) -> None:
    def fails(*words: str) -> str:
        with process(*words) as started:
            out, err = started.communicate(timeout=120)
        assert (started.returncode, out) == (2, "")
        return err.splitlines()[-1]

    assert fails(str(tmp_path / "nothing")).startswith("serried serve: error: ")
    assert "--tensor-parallel-size 99" in fails(str(model), "-tp", "99", *OPTIONS)
    assert "--tool-call-parser x: unknown" in fails(str(model), "--tool-call-parser", "x")
    assert "no-such.jinja: cannot be read" in fails(str(model), "--chat-template", "no-such.jinja")
    with socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert "Address already in use" in fails(str(model), "--port", port)
