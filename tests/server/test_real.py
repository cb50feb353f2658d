"""The whole server over a real engine on two ranks: streams, clients that leave or never read, bad input, prefixes.

Its model is tiny and random; its vocabulary has whole emoji and CJK characters, their halves, and single bytes.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_server import OPTIONS, PATIENCE, RealServer, serving, until
from test_bad_input import CHATS, COMPLETION, HELLO, RAW, dumps, refused
from tiny_models import BASE, TEXT, Models, write_tokenizer

from serried.text.tokenizer import Tokenizer

WORLD = [
    "😀😃😄😎🎉😀😎 👍🏽👍🏽 👨‍👩‍👧👨‍👩‍👧 🇨🇳🇯🇵",
    "你好世界，你好，世界你好 日本語の文章 日本語 한국어 한국어",
    "Здравствуй, мир naïve café, naïve café",
    *TEXT,
]
ENDS = 2


@pytest.fixture(scope="module")
def directory(tiny: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.copy("split-text", tmp_path_factory.mktemp("world"))
    write_tokenizer(path, BASE["vocab_size"], WORLD)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


@pytest.fixture(scope="module")
def running(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    options = (
        "--max-num-seqs",
        "32",
        "--max-num-batched-tokens",
        "64",
        "--write-timeout",
        "1",
        "--tool-call-parser",
        "hermes",
    )
    with serving(tmp_path_factory.mktemp("server"), str(directory), "-tp", "2", *options, *OPTIONS) as server:
        ranks = server.ranks
        yield server
        assert server.ranks == ranks, "a rank has died"
        assert server.end(signal.SIGTERM) == 0


@pytest.fixture
def server(running: RealServer) -> Iterator[RealServer]:
    yield running
    assert running.wait_idle()["restarts"] == 0


def asynchronous(server: RealServer) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    return httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits)


def resident(server: RealServer) -> int:
    """Bytes that the server's processes hold, all together."""

    def of(pid: int) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096

    return sum(of(pid) for pid in (server.process.pid, *server.ranks))


def descriptors(server: RealServer) -> list[int]:
    """How many files each of the server's processes has open."""
    return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (server.process.pid, *server.ranks)]


# --- Streams ---


def random_body(rng: random.Random, tokenizer: Tokenizer, chat: bool) -> dict[str, Any]:
    """What to ask: mostly of a few tokens that are parts of characters, so that many are put together, and broken."""
    halves = [t for t in range(BASE["vocab_size"]) if any(byte > 127 for byte in tokenizer.token_bytes(t))]
    wide = [t for t in halves if len(tokenizer.token_bytes(t)) > 1]
    text = "".join(rng.choices("".join(WORLD), k=rng.randint(1, 12)))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    body |= {"temperature": rng.choice([0.7, 1.0, 2.0]), "seed": rng.getrandbits(62), "max_tokens": rng.randint(1, 40)}
    body |= {"return_token_ids": True, "ignore_eos": rng.random() < 0.5}
    chosen = None
    match rng.choice(["any", "wide", "parts", "parts"]):
        case "wide":
            chosen = wide
        case "parts":  # of a character or two, which are likely to meet again
            whole = "".join(rng.sample("😀😎👍你好界é한", rng.randint(1, 2))).encode()
            chosen = [t for t in halves if tokenizer.token_bytes(t) in whole]
    if chosen is not None:
        body["allowed_token_ids"] = sorted({*chosen, *([ENDS, 1] if rng.random() < 0.5 else [])})
    if rng.random() < 0.3:
        body["skip_special_tokens"] = False
    if rng.random() < 0.25:
        body |= {"n": rng.randint(2, 3)}
    return body


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """A whole answer's choices: text, token ids, why it ended."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    found = {}
    for choice in response.json()["choices"]:
        text = choice["message"]["content"] or "" if "message" in choice else choice["text"]
        end = (choice["finish_reason"], choice["stop_reason"])
        found[choice["index"]] = {"text": text, "ids": choice["token_ids"], "end": end}
    return found


async def ask_streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The same of a streamed one, put together by hand."""
    found: dict[int, dict[str, Any]] = {}
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        events = (await response.aread()).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    for event in events[:-2]:
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            sample = found.setdefault(choice["index"], {"text": "", "ids": [], "end": None})
            assert sample["end"] is None, "more after the end"
            sample["text"] += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            sample["ids"] += choice.get("token_ids") or []
            if choice["finish_reason"]:
                sample["end"] = (choice["finish_reason"], choice["stop_reason"])
    return found


def said(tokenizer: Tokenizer, ids: list[int], body: dict[str, Any]) -> str:
    """The text of some tokens, by Python's own decoder."""
    hidden = set(tokenizer.control_ids) if body.get("skip_special_tokens", True) else set()
    ends = [] if body["ignore_eos"] else [ENDS]
    kept = ids[:-1] if ids and ids[-1] in ends else ids
    return b"".join(tokenizer.token_bytes(t) for t in kept if t not in hidden).decode("utf-8", "replace")


async def check_one(client: httpx.AsyncClient, tokenizer: Tokenizer, number: int) -> str:
    rng = random.Random(number)
    chat = rng.random() < 0.4
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = random_body(rng, tokenizer, chat)
    whole = await ask(client, path, body)
    assert await ask_streamed(client, path, body) == whole, body
    for sample in whole.values():
        assert sample["text"] == said(tokenizer, sample["ids"], body), body
    text = whole[0]["text"]
    if text and rng.random() < 0.7:
        at = rng.randrange(len(text))
        stops = [text[at : at + rng.randint(1, 3)], "zzz"]
        body |= {"stop": stops, "include_stop_str_in_output": rng.random() < 0.3}
        cut = await ask(client, path, body)
        assert await ask_streamed(client, path, body) == cut, body
        first = text.index(stops[0])
        assert cut[0]["end"] == ("stop", stops[0])
        kept = first + len(stops[0]) if body["include_stop_str_in_output"] else first
        assert cut[0]["text"] == text[:kept], body
    return text


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.soak)])
def test_streamed_is_whole(server: RealServer, tokenizer: Tokenizer, count: int) -> None:
    """To the byte; and both are what the tokens say, up to the first stop string."""

    async def run() -> str:
        gate = asyncio.Semaphore(24)
        async with asynchronous(server) as client:

            async def one(number: int) -> str:
                async with gate:
                    return await check_one(client, tokenizer, number)

            return "".join(await asyncio.gather(*map(one, range(count))))

    text = asyncio.run(run())
    ranges = {
        "emoji": ("\U0001f300", "\U0001faff"),
        "CJK": ("\u4e00", "\u9fff"),
        "half a character": ("\ufffd", "\ufffd"),
    }
    for kind, (first, last) in ranges.items():
        assert any(first <= character <= last for character in text), f"{kind}: was never said"


# --- Clients that go ---


async def leave(client: httpx.AsyncClient, rng: random.Random) -> None:
    """Ask for much, in any of the ways, and leave at any time."""
    body = {"prompt": rng.choice(TEXT), "max_tokens": 150, "ignore_eos": True, "n": rng.randint(1, 3), "temperature": 1}
    try:
        async with asyncio.timeout(rng.choice([0.005, 0.02, 0.1])):
            if rng.random() < 0.4:
                await client.post("/v1/completions", json=body)
                return
            async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                async for _ in response.aiter_bytes():
                    if rng.random() < 0.2:
                        return
    except (TimeoutError, httpx.HTTPError):
        return


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cycles", [50, pytest.param(1000, marks=pytest.mark.soak)])
def test_clients_that_leave(server: RealServer, cycles: int) -> None:
    """No block stays held, no memory and no descriptor is lost."""

    async def burst(count: int, seed: int) -> None:
        gate = asyncio.Semaphore(16)

        async def one(number: int) -> None:
            async with gate, asynchronous(server) as client:
                await leave(client, random.Random(seed + number))

        await asyncio.gather(*map(one, range(count)))

    asyncio.run(burst(50, 0))  # what is made once is made now
    server.wait_idle()
    memory, files = resident(server), until(lambda: descriptors(server))
    for start in range(0, cycles, 50):
        asyncio.run(burst(50, 1000 + start))
        assert server.wait_idle()["blocks_used"] == 0
    until(lambda: all(now <= before + 1 for now, before in zip(descriptors(server), files, strict=True)), 20)
    assert resident(server) - memory < (4 << 20) + 2000 * cycles


def test_a_client_that_never_reads(server: RealServer) -> None:
    """Its request ends, though there is more to say than the kernel takes."""
    body = {"prompt": "x", "stream": True, "n": 60, "max_tokens": 240, "ignore_eos": True, "temperature": 1}
    content = dumps({**body, "logprobs": 20})
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        lines = ("POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json")
        head = "\r\n".join((*lines, f"content-length: {len(content)}", "", ""))
        connection.sendall(head.encode() + content)
        until(lambda: server.stats()["running"])
        before = server.stats()["generated_tokens"]
        server.wait_idle()
        assert server.stats()["generated_tokens"] - before < 60 * 240


# --- Prefixes ---


def test_a_known_prefix_is_not_computed_again(server: RealServer) -> None:
    asked = {"prompt": [5 + n % 300 for n in range(230)], "max_tokens": 1, "temperature": 0}
    first, again = (server.post("/v1/completions", **asked) for _ in range(2))
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in (first, again)]
    assert cached == [0, 224]
    assert first["choices"][0]["text"] == again["choices"][0]["text"]


# --- Bad input ---


def test_bad_input(server: RealServer) -> None:
    """All that the fake engine's tests have, over the real one: a 4xx that names the field, and nothing runs."""
    json_type = {"content-type": "application/json"}
    before = server.wait_idle()["prompt_tokens"]
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        for body, param in COMPLETION:
            content = dumps({"prompt": "x", "temperature": 1, **body})
            refused(http.post("/v1/completions", content=content, headers=json_type), param)
        for body, param in CHATS:
            refused(http.post("/v1/chat/completions", json={"messages": HELLO, **body}), param)
        for content, _ in RAW:
            assert http.post("/v1/completions", content=content, headers=json_type).status_code == 400
        for body in ({"prompt": [1] * 300_000}, {"prompt": "x" * 7_000_000}, {"prompt": [[1]] * 200_000}):
            refused(http.post("/v1/completions", json=body), "prompt")
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"):
            assert http.post(path, content=b"x" * 10_000_000, headers=json_type).status_code == 413
        assert http.get("/ready").status_code == 200
    assert server.wait_idle()["prompt_tokens"] == before + 1


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a{1000}){1000}", "(x+x+)+y", "(.*a.{20})", "(a|a?)+" * 50])
def test_a_catastrophic_regex(server: RealServer, pattern: str) -> None:
    """It is refused, or held to within the engine: others are answered beside it."""
    body = {"prompt": "x", "guided_regex": pattern, "max_tokens": 20, "temperature": 1, "seed": 1}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["param"] == "guided_regex"
    assert httpx.get(f"{server.url}/ready").status_code == 200


def test_nothing_may_be_chosen(server: RealServer) -> None:
    """A request whose every token is forbidden is refused; one that runs into that ends."""
    body: dict[str, Any] = {"prompt": "x", "allowed_token_ids": [ENDS], "min_tokens": 5, "max_tokens": 9}
    refused(httpx.post(f"{server.url}/v1/completions", json=body), None)
    ending = {"prompt": "x", "allowed_token_ids": [40], "bad_words": ["x"], "max_tokens": 9}
    assert httpx.post(f"{server.url}/v1/completions", json=ending).status_code in (200, 400)


@pytest.mark.parametrize(
    "body",
    [
        {"logit_bias": {str(t): -100 for t in range(320)}},
        {"logit_bias": {"5": 100}, "temperature": 1e30},
        {"temperature": 1e-30},
        {"top_p": 1e-300},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"min_p": 1.0, "top_k": 2**31 - 1},
    ],
    ids=str,
)
def test_extremes_are_answered(server: RealServer, body: dict[str, Any]) -> None:
    reply = server.post("/v1/completions", prompt=TEXT[0], max_tokens=5, ignore_eos=True, **{"temperature": 1, **body})
    assert reply["choices"][0]["finish_reason"] == "length"
