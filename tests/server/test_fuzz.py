"""Random JSON in every field of every route: never a 5xx, never an endless stream, and the engine lives on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fakes import THINKS, FakeEngine, Served, served
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from serried.server.protocol_chat import ChatRequest
from serried.server.protocol_completions import CompletionRequest
from serried.server.protocol_messages import CountRequest, MessagesRequest
from serried.server.protocol_responses import ResponsesRequest
from serried.server.protocol_tokens import DetokenizeRequest, TokenizeRequest

TEXT = st.text(max_size=8) | st.sampled_from(
    ["", "user", "assistant", "tool", "function", "text", "auto", "<think>", "a\x00b"]
)
NUMBERS = st.integers(-3, 5) | st.integers() | st.floats(allow_nan=False, allow_infinity=False, width=32)
KEYS = st.sampled_from(
    ["type", "role", "content", "text", "name", "function", "arguments", "tool_calls", "schema", "json_schema", "5",
     "input", "properties", "enum", "pattern", "format", "parameters", "input_schema", "output", "call_id", "$ref"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
MESSAGES = [{"role": "user", "content": "x"}]
ROUTES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "x", "max_tokens": 3}),
    "/v1/chat/completions": (ChatRequest, {"messages": MESSAGES, "max_tokens": 3}),
    "/v1/responses": (ResponsesRequest, {"input": "x", "max_output_tokens": 3}),
    "/v1/messages": (MessagesRequest, {"messages": MESSAGES, "max_tokens": 3}),
    "/v1/messages/count_tokens": (CountRequest, {"messages": MESSAGES}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with served(FakeEngine(template=THINKS)) as running:
        yield running


@pytest.mark.parametrize("path", ROUTES)
def test_random_values_in_every_field(server: Served, path: str) -> None:
    model, base = ROUTES[path]
    names = st.sampled_from(sorted(model.model_fields))

    with httpx.Client(base_url=server.url, timeout=20) as http:

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.dictionaries(names, JSON, min_size=1, max_size=3))
        @example({"stream": True})
        def run(fields: dict[str, Any]) -> None:
            response = http.post(path, content=json.dumps(base | fields), headers={"content-type": "application/json"})
            assert response.status_code in (200, 400, 404), (fields, response.text)
            if response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream"):
                assert response.text.endswith("\n\n")
            else:
                response.json()

        run()
    assert server.idle()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    items=st.lists(JSON, max_size=3), path=st.sampled_from(["/v1/chat/completions", "/v1/messages", "/v1/responses"])
)
def test_random_conversations(shared: Served, items: list[Any], path: str) -> None:
    body = {**ROUTES[path][1], ("input" if path == "/v1/responses" else "messages"): items}
    response = httpx.post(f"{shared.url}{path}", json=body, timeout=20)
    assert response.status_code in (200, 400), (items, response.text)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_random_bytes(shared: Served, content: bytes) -> None:
    response = httpx.post(
        f"{shared.url}/v1/completions", content=content, headers={"content-type": "application/json"}, timeout=20
    )
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
