"""/v1/responses: what OpenAI's client makes of it, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fakes import THINKS, FakeEngine, Served, counted, served, tiny_tokenizer

from serried.text.chat import encode_chat

TOKENIZER = tiny_tokenizer(THINKS)
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with served(FakeEngine(template=THINKS)) as running:
        yield running


def prompt_of(server: Served) -> str:
    return TOKENIZER.decode(server.engine.asked[-1]["prompt"], skip_special=False)


def test_a_response(client: openai.OpenAI, server: Served) -> None:
    reply = client.responses.create(model="tiny", input="Hello", instructions="Be brief", metadata={"a": "b"})
    ids = encode_chat(TOKENIZER, [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}])
    assert server.engine.asked[0]["prompt"] == ids
    assert reply.output_text == counted(ids, 0)
    assert (reply.status, reply.object, reply.metadata) == ("completed", "response", {"a": "b"})
    assert reply.usage is not None
    assert reply.usage.input_tokens == len(ids)
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert [item.type for item in reply.output] == ["message"]


def test_every_kind_of_item_streamed(client: openai.OpenAI, server: Served) -> None:
    said = f"<think>Hm.</think>I look.\n{CALL}\n{CALL}"
    server.engine.say = lambda prompt, index: said
    with client.responses.stream(model="tiny", input="Hello", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type, events[-1].type] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, call, _ = (item.to_dict() for item in final.output)
    assert reasoning["content"][0]["text"] == "Hm."  # type: ignore[index]
    assert message["content"][0]["text"] == final.output_text == "I look."  # type: ignore[index]
    assert json.loads(str(call["arguments"])) == {"city": "Paris"}
    whole = client.responses.create(model="tiny", input="Hello", tools=[TOOL])
    fixed = {"id", "call_id"}
    plain = [{k: v for k, v in item.to_dict().items() if k not in fixed} for item in whole.output]
    again = [{k: v for k, v in item.to_dict().items() if k not in fixed} for item in final.output]
    for item in again:  # the client's own parsing
        item.pop("parsed_arguments", None)
        for part in item.get("content") or ():  # type: ignore[attr-defined]
            part.pop("parsed", None)
    assert plain == again


def test_text_deltas_are_the_text(client: openai.OpenAI, server: Served) -> None:
    pieces, done = [], None
    for event in client.responses.create(model="tiny", input="Hello", stream=True):
        if event.type == "response.output_text.delta":
            pieces.append(event.delta)
        if event.type == "response.output_text.done":
            done = event.text
    assert "".join(pieces) == done == counted(server.engine.asked[0]["prompt"], 0)


def test_a_conversation_with_calls(client: openai.OpenAI, server: Served) -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
    ]
    client.responses.create(model="tiny", input=items)
    assert prompt_of(server).startswith(
        "<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\nI look.get_weather([('city', 'Paris')])<|im_end|>\n"
        "<|im_start|>tool\nrain<|im_end|>\n"
    )


def test_too_short(client: openai.OpenAI) -> None:
    reply = client.responses.create(model="tiny", input="Hello", max_output_tokens=5)
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(model="tiny", input="Hello", max_output_tokens=5, stream=True))
    assert events[-1].type == "response.incomplete"


def test_a_schema(client: openai.OpenAI, server: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    client.responses.create(model="tiny", input="Hello", text=text)
    grammar = server.engine.asked[0]["grammar"]
    assert (grammar.kind, json.loads(grammar.text)) == ("json_schema", schema)


def test_logprobs(client: openai.OpenAI) -> None:
    reply = client.responses.create(
        model="tiny", input="Hello", top_logprobs=2, include=["message.output_text.logprobs"], max_output_tokens=4
    )
    part = reply.output[0].to_dict()["content"][0]  # type: ignore[index]
    assert len(part["logprobs"]) == 4
    assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [2] * 4


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, None),
        ({"input": "x " * 3000}, "input"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "max_output_tokens": 5000}, "max_output_tokens"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        (
            {"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice.function.name",
        ),
        ({"input": "x", "text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"input": "x", "text": {"format": 5}}, "text.format"),
        ({"input": "x", "text": {"format": {"type": "x"}}}, "text.format.type"),
        ({"input": "x", "reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"input": "x", "temperature": -1}, "temperature"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_input(http: httpx.Client, server: Served, body: dict[str, Any], param: str | None) -> None:
    for stream in (False, True):
        response = http.post("/v1/responses", json={"stream": stream, **body})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert param is None or error["param"] == param, error
        assert "messages" not in error["message"]
    assert not server.engine.asked
