"""Who is let in, how much is taken, and what happens when a client leaves, or never reads."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from socket import IPPROTO_TCP, SO_RCVBUF, SOL_SOCKET, TCP_NODELAY, create_connection, socket
from typing import Any

import anthropic
import httpx
import openai
import pytest
from certificates import certificate
from fakes import FakeEngine, Served, served

from serried.errors import EngineDead, InputError, QueueFull, RankFailed
from serried.server.options import ServerConfig
from serried.server.run import bind

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ENDLESS = "x" * 1500
ROUTES = [
    ("GET", "/"), ("GET", "/static/app.js"), ("GET", "/ready"), ("GET", "/version"), ("GET", "/metrics"),
    ("GET", "/stats"), ("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"), ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"), ("POST", "/tokenize"),
    ("POST", "/detokenize"), ("GET", "/nothing"), ("GET", "//health"), ("GET", "/health/"), ("GET", "/HEALTH"),
    ("OPTIONS", "/v1/models"),
]  # fmt: skip


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with served(api_key=("sésame", "other")) as running:
        yield running


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer "},
        {"authorization": "other"},
        {"authorization": "Basic !!!"},
        {"x-api-key": "other2"},
        {"host": "/health"},
        {"x-forwarded-path": "/health"},
    ],
)
def test_every_route_but_health_wants_the_key(locked: Served, method: str, path: str, headers: dict[str, str]) -> None:
    with closing(HTTPConnection("127.0.0.1", locked.port)) as connection:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        assert response.status == 401
        assert response.headers["www-authenticate"].startswith("Basic")
        assert b"authentication_error" in response.read()


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sésame".encode()},
        {"authorization": b"bearer other"},
        {"x-api-key": b"other"},
        {"authorization": b"Basic " + base64.b64encode(b"anybody:other")},
    ],
)
def test_a_key_opens(locked: Served, headers: dict[str, bytes]) -> None:
    assert httpx.get(f"{locked.url}/v1/models", headers=headers).status_code == 200


def test_health_is_open(locked: Served) -> None:
    assert httpx.get(f"{locked.url}/health").status_code == 200


def test_the_clients_bring_their_keys(locked: Served) -> None:
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="other", max_retries=0) as client:
        assert client.models.list().data[0].id == "tiny"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="no").models.list()
    with anthropic.Anthropic(base_url=locked.url, api_key="other", max_retries=0) as claude:
        assert claude.messages.count_tokens(model="tiny", messages=HELLO).input_tokens > 0
        with pytest.raises(anthropic.AuthenticationError):
            claude.with_options(api_key="no").messages.count_tokens(model="tiny", messages=HELLO)


def test_each_key_has_prefixes_of_its_own(locked: Served) -> None:
    locked.engine.asked.clear()
    for key in ("other", "sésame", "other"):
        headers = {"authorization": f"Bearer {key}".encode()}
        httpx.post(f"{locked.url}/v1/completions", json={"prompt": "x"}, headers=headers)
    first, second, third = (asked["salt"] for asked in locked.engine.asked)
    assert first == third != second
    assert "other" not in first


def test_bodies(server: Served) -> None:
    with served(max_body_size=10_000) as small:
        for content in (b"x" * 10_001, iter([b"x" * 4000] * 3)):
            headers = {"content-type": "application/json"}
            response = httpx.post(f"{small.url}/v1/completions", content=content, headers=headers)
            assert response.status_code == 413
            assert "--max-body-size" in response.json()["error"]["message"]
        assert httpx.post(f"{small.url}/v1/completions", json={"prompt": "x" * 900}).status_code == 200
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x" * 10_000_000}, timeout=20)
    assert response.status_code == 413


def test_a_body_that_does_not_arrive() -> None:
    with served(body_timeout=0.3) as slow, create_connection(("127.0.0.1", slow.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
        )
        connection.settimeout(5)
        assert read_all(connection).startswith(b"HTTP/1.1 408 ")


def test_headers(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 100_000 + b"\r\n\r\n")
        connection.settimeout(5)
        assert connection.recv(65536).startswith(b"HTTP/1.1 431 ")
    with create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(5)
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        time.sleep(0.1)
        for _ in range(40):
            connection.sendall(b"x: " + b"y" * 1000 + b"\r\n")
            time.sleep(0.001)
        reply = read_all(connection)
    assert reply.startswith(b"HTTP/1.1 431 ") and b"--max-header-size" in reply
    with create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"\x16\x03\x01 not http\r\n\r\n")
        connection.settimeout(5)
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")


def test_headers_that_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serried.server.http1.HEADER_SECONDS", 0.3)
    with served() as slow, create_connection(("127.0.0.1", slow.port)) as connection:
        connection.settimeout(5)
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert connection.recv(100) == b""


def read_all(connection: socket) -> bytes:
    data = b""
    while True:
        try:
            more = connection.recv(65536)
        except ConnectionResetError:
            return data
        if not more:
            return data
        data += more


def test_the_queue() -> None:
    engine = FakeEngine()
    engine.model = engine.model.__class__("tiny", 2048, 512, frozenset({2}), max_num_seqs=2)
    engine.hold.set()
    with served(engine, max_queued_requests=1) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        threads = [
            threading.Thread(target=lambda: http.post("/v1/completions", json={"prompt": "x"})) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        while len(engine.live) < 3:
            time.sleep(0.01)
        for path, body in (("completions", {"prompt": "x", "stream": True}), ("chat/completions", {"messages": HELLO})):
            response = http.post(f"/v1/{path}", json=body)
            assert response.status_code == 429
            assert 1 <= int(response.headers["retry-after"]) <= 60
            assert response.json()["error"]["code"] == "queue_full"
        claude = http.post("/v1/messages", json={"messages": HELLO, "max_tokens": 5})
        assert (claude.status_code, claude.json()["error"]["type"]) == (429, "rate_limit_error")
        engine.hold.clear()
        for thread in threads:
            thread.join()
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        # One request that is larger than the whole queue is not refused for ever.
        big = {"prompt": ["x"] * 8, "max_tokens": 2}
        assert http.post("/v1/completions", json=big).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFull(7, 3.2), 429, "rate_limit_error"),
        (EngineDead("rank 1 died"), 503, "service_unavailable_error"),
        (InputError("top_k: 5 is too much"), 400, "invalid_request_error"),
        (RankFailed(1, "died"), 500, "server_error"),
    ],
)
def test_what_the_engine_raises(
    server: Served, http: httpx.Client, error: Exception, status: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.error = error
    for stream in (False, True):
        response = http.post("/v1/completions", json={"prompt": "x", "stream": stream})
        assert response.status_code == status
        told = response.json()["error"]
        assert told["type"] == kind
        assert (told["param"] == "top_k") == isinstance(error, InputError)
        if status == 429:
            assert response.headers["retry-after"] == "4"
        if status == 500:
            assert "died" not in response.text


def test_an_error_in_the_midst(server: Served, http: httpx.Client) -> None:
    server.engine.error, server.engine.error_after = EngineDead("rank 1 died"), 5
    assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
    for path, body, mark in (
        ("completions", {"prompt": "x"}, '"error":{"message":"the engine cannot answer: rank 1 died"'),
        ("chat/completions", {"messages": HELLO}, '"error":{"message":"the engine cannot answer: rank 1 died"'),
        ("messages", {"messages": HELLO, "max_tokens": 20}, "event: error\n"),
        ("responses", {"input": "x"}, "event: response.failed\n"),
    ):
        response = http.post(f"/v1/{path}", json={**body, "stream": True})
        assert response.status_code == 200
        assert mark in response.text
        assert response.text.endswith("\n\n")
    assert "[DONE]" in http.post("/v1/completions", json={"prompt": "x", "stream": True}).text


def test_while_loading() -> None:
    with served(wait=False) as server, httpx.Client(base_url=server.url) as http:
        assert http.get("/health").json() == {"status": "ok", "engine": "loading"}
        for method, path in ROUTES[:14]:
            response = http.request(method, path)
            assert (response.status_code, response.headers["retry-after"]) == (503, "2"), path
            assert "loaded" in response.json()["error"]["message"]
        server.release.set()
        deadline = time.monotonic() + 5
        while http.get("/ready").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    assert server.engine.closed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
def test_a_client_that_leaves_ends_its_request(server: Served, path: str, stream: bool) -> None:
    server.engine.say = lambda prompt, index: ENDLESS
    server.engine.delay = 0.005
    body: dict[str, Any] = {"stream": stream, "n": 2 if "/" in path else 1, "max_tokens": 1500, "temperature": 1}
    body |= {"completions": {"prompt": ["x", "y"]}, "responses": {"input": "x"}}.get(path, {"messages": HELLO})
    with closing(HTTPConnection("127.0.0.1", server.port)) as connection:
        connection.request("POST", f"/v1/{path}", json.dumps(body), {"content-type": "application/json"})
        if stream:
            assert connection.getresponse().read(100)
        else:
            while not server.engine.live:
                time.sleep(0.01)
        assert server.engine.live
    assert server.idle(4)  # to its end it would take 7.5 s
    assert server.engine.generated < 1500


def test_a_client_that_never_reads() -> None:
    """It costs what the kernel buffers, and its request ends."""
    engine = FakeEngine(lambda prompt, index: ENDLESS)
    with served(engine, write_timeout=1.0) as server, socket() as connection:
        connection.setsockopt(SOL_SOCKET, SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        body = b'{"prompt": "x", "stream": true, "max_tokens": 1500, "n": 60, "temperature": 1}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        while not engine.live:
            time.sleep(0.01)
        assert server.idle(15)
        deadline = time.monotonic() + 10
        while server.server.server_state.connections and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not server.server.server_state.connections
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_silence_is_broken() -> None:
    engine = FakeEngine()
    engine.hold.set()
    with served(engine, ping_interval=0.2) as server:
        threading.Timer(1.6, engine.hold.clear).start()
        text = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "stream": True}, timeout=20).text
    assert text.startswith(": still working\n\n")
    assert text.endswith("data: [DONE]\n\n")


def test_tls(tmp_path: Path) -> None:
    keyfile, certfile = certificate(tmp_path)
    with served(ssl_keyfile=keyfile, ssl_certfile=certfile) as server:
        context = ssl.create_default_context(cafile=certfile)
        response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, verify=context)
        assert response.status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url.replace('https', 'http')}/health")


def test_an_idle_tls_client_does_not_hold_up_the_end(tmp_path: Path) -> None:
    keyfile, certfile = certificate(tmp_path)
    context = ssl.create_default_context(cafile=certfile)
    with httpx.Client(verify=context) as idle:
        with served(ssl_keyfile=keyfile, ssl_certfile=certfile) as server:
            assert idle.get(f"{server.url}/health").status_code == 200
            start = time.monotonic()
        assert time.monotonic() - start < 8  # it would wait for 10 s, then give up on all that still runs


def test_nothing_waits_for_a_full_packet(server: Served) -> None:
    """With Nagle's algorithm a body waits 40 ms for the client's word that it has the headers."""
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/health").status_code == 200
        found = [each.transport for each in list(server.server.server_state.connections)]
        assert found
        assert all(each.get_extra_info("socket").getsockopt(IPPROTO_TCP, TCP_NODELAY) for each in found)


def test_cors() -> None:
    ask = {"origin": "http://a.example", "access-control-request-method": "POST"}
    with served(allowed_origins=("http://a.example",), api_key=("k",)) as server:
        preflight = httpx.options(f"{server.url}/v1/completions", headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://a.example"
        other = httpx.options(f"{server.url}/v1/completions", headers={**ask, "origin": "http://b.example"})
        assert "access-control-allow-origin" not in other.headers
    with served() as server:
        headers = httpx.get(f"{server.url}/v1/models", headers={"origin": "http://a.example"}).headers
        assert "access-control-allow-origin" not in headers


def test_a_port_in_use_is_known_before_anything_is_loaded() -> None:
    with bind(ServerConfig(port=0)) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(InputError, match=f"--port {port}: Address already in use"):
            bind(ServerConfig(port=port))
    with pytest.raises(InputError, match=r"--host 203\.0\.113\.1"):
        bind(ServerConfig(host="203.0.113.1", port=0))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"port": -1}, "--port -1"),
        ({"port": 70000}, "--port 70000"),
        ({"log_level": "loud"}, "--log-level loud"),
        ({"reasoning_parser": "x"}, "--reasoning-parser x"),
        ({"max_n": 0}, "--max-n 0"),
        ({"max_queued_requests": -1}, "--max-queued-requests -1"),
        ({"write_timeout": 0.0}, "--write-timeout"),
        ({"ping_interval": float("nan")}, "--ping-interval"),
        ({"api_key": ("",)}, "--api-key"),
        ({"ssl_keyfile": "x"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_certfile": "x", "ssl_keyfile": "y"}, "--ssl-keyfile y: no such file"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        ServerConfig(**options)
