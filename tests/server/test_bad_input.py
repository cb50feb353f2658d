"""Bad input: a 4xx with the error object that names the field; never a 5xx, an endless stream or a dead engine."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest
from fakes import CHAT, HERMES, FakeEngine, Served, served

HELLO = [{"role": "user", "content": "Hello"}]
BIG = 10**30


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def nested(depth: int) -> Any:
    value: Any = {"type": "integer"}
    for _ in range(depth):
        value = {"type": "array", "items": value}
    return value


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

# What is wrong, and the field that the error names.
COMPLETION: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": ["x", 5]}, "prompt[1]"),
    ({"prompt": [512]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [BIG]}, "prompt"),
    ({"prompt": [5] * 2048}, "prompt"),
    ({"prompt": "x " * 3000}, "prompt"),
    ({"prompt": "x" * 4_000_000}, "prompt"),
    ({"prompt": ["x"] * 3000}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2048}, "max_tokens"),
    ({"max_tokens": BIG}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 65}, "n"),
    ({"n": BIG}, "n"),
    ({"n": 64, "prompt": ["x"] * 1000}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": BIG}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": -1}, "seed"),
    ({"seed": BIG}, "seed"),
    ({"presence_penalty": 5}, "presence_penalty"),
    ({"frequency_penalty": -5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["x" * 5000]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": [None]}, "stop[0]"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [BIG]}, "stop_token_ids"),
    ({"allowed_token_ids": [600]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 200}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"priority": BIG}, "priority"),
    ({"cache_salt": "x" * 1000}, "cache_salt"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": 5}, "stream_options"),
    ({"model": 5}, "model"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"guided_grammar": "root ::= x"}, "guided_grammar"),
    # Grammars: refused where they cannot be enforced, however they were asked for.
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
    (schema(5), "response_format.json_schema.schema"),
    (schema({"type": "nonsense"}), "response_format.json_schema.schema"),
    (schema({"not": {"type": "string"}}), "response_format.json_schema.schema"),
    (schema({"$ref": "#"}), "response_format.json_schema.schema"),
    (schema({"allOf": [{"$ref": "#"}]}), "response_format.json_schema.schema"),
    (schema({"$ref": "#/$defs/missing"}), "response_format.json_schema.schema"),
    (schema({"$ref": "http://127.0.0.1:1/x"}), "response_format.json_schema.schema"),
    (schema({"type": "string", "pattern": "("}), "response_format.json_schema.schema"),
    (schema({"type": "string", "pattern": "(?=a)b"}), "response_format.json_schema.schema"),
    (schema({"x-guidance": {"lenient": True}, "not": {}}), "response_format.json_schema.schema"),
    (schema(nested(80)), "response_format.json_schema.schema"),
    (schema({"enum": ["x" * 300_000]}), "response_format.json_schema.schema"),
    ({"response_format": {"type": "regex", "regex": "("}}, "response_format.regex"),
    ({"response_format": {"type": "regex", "pattern": "a\\"}}, "response_format.pattern"),
    ({"response_format": {"type": "regex"}}, "response_format.regex"),
    ({"guided_regex": "(a)\\1"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[]"}, "guided_json"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "x"}}, "grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
]

CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "x" * 4_000_000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x " * 3000}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0].function"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"continue_final_message": True}, "messages[0]"),
    ({"continue_final_message": True, "messages": [{"role": "assistant", "content": "x"}]}, "messages[0]"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 2048}, "max_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web", "function": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [TOOL] * 300}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
            "tool_choice": "required",
        },
        "tools",
    ),
    ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"chat_template": "x"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
]


@pytest.fixture(scope="module")
def shared() -> Any:
    with served(FakeEngine(template=HERMES)) as running:
        yield running


def refused(response: httpx.Response, param: str | None, status: int = 400) -> str:
    """Check an error object; its message."""
    assert response.status_code == status, response.text[:500]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert len(error["message"]) < 1000
    return str(error["message"])


@pytest.mark.parametrize(("body", "param"), COMPLETION, ids=lambda value: str(value)[:60])
def test_completions(http: httpx.Client, server: Served, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        body = {"prompt": "x", "stream": stream, "temperature": 1, **body}
        response = http.post("/v1/completions", content=dumps(body), headers={"content-type": "application/json"})
        assert param.partition("[")[0].partition(".")[0] in refused(response, param)
    assert not server.engine.asked


@pytest.mark.parametrize(("body", "param"), CHATS, ids=lambda value: str(value)[:60])
def test_chats(http: httpx.Client, server: Served, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        response = http.post("/v1/chat/completions", json={"messages": HELLO, "stream": stream, **body})
        refused(response, param)
    assert not server.engine.asked


def dumps(body: Any) -> bytes:
    return json.dumps(body).encode()


RAW: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"[]", None),
    (b"null", None),
    (b'"x"', None),
    (b'{"prompt": "x"} {', None),
    (b'{"prompt": "\xff"}', None),
    (b'\xef\xbb\xbf{"prompt": "x"}', None),
    (b'{"prompt": "\\ud800"}', "prompt"),
    (b'{"prompt": ["x", "a\\udc00"]}', "prompt[1]"),
    (b'{"prompt": "x", "stop": ["\\ud83d"]}', "stop[0]"),
    (b'{"prompt": "x", "temperature": NaN}', "temperature"),
    (b'{"prompt": "x", "temperature": -Infinity}', "temperature"),
    (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
    (b'{"prompt": "x", "logit_bias": {"5": NaN}}', "logit_bias.5"),
    (b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", None),
    (b"[" * 100_000, None),
    (b'{"prompt":' * 50_000, None),
    (b'{"messages": [{"role": "user", "content": "\\udfff"}]}', "messages[0].content"),
]


@pytest.mark.parametrize(("body", "param"), RAW, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_what_is_no_json(http: httpx.Client, path: str, body: bytes, param: str | None) -> None:
    response = http.post(path, content=body, headers={"content-type": "application/json"})
    if path == "/tokenize" and b"1e999" in body:
        return  # a field that it does not have
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] in (param, "prompt", "messages", "input")


def test_only_json_is_taken(http: httpx.Client) -> None:
    """Else any web page could post here from its reader's browser."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind})
        assert "application/json" in refused(response, None, 415)
    assert http.post("/v1/completions", content=b'{"prompt": "x"}').status_code == 415


def test_another_model_is_not_found(http: httpx.Client) -> None:
    for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": HELLO})):
        refused(http.post(f"/v1/{path}", json={"model": "gpt", **body}), "model", 404)


def test_paths_and_methods(http: httpx.Client) -> None:
    refused(http.get("/v1/nothing"), None, 404)
    refused(http.get("/v1/completions"), None, 405)
    refused(http.get("/static/../app.py"), None, 404)
    refused(http.get("/static/..%2fapp.py"), None, 404)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a{1000}){1000}", "((a{100}){100}){100}", "a{1000000}", "(x+x+)+y", "(.*a.{20})", "(a|a?)+" * 50],
)
def test_a_catastrophic_regex_holds_nobody_up(http: httpx.Client, server: Served, pattern: str) -> None:
    """It is refused, or compiled within its fuel: others are answered meanwhile, and soon."""
    start = time.monotonic()
    response = http.post("/v1/completions", json={"prompt": "x", "guided_regex": pattern})
    assert response.status_code in (200, 400)
    assert time.monotonic() - start < 5
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "stopped"),
        ("{{ 'x' * 999999999999 }}", ""),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% if", "template"),
        ("{{ raise_exception('not like this') }}", "not like this"),
        ("", "empty"),
    ],
)
def test_a_bad_template(template: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serried.text.template_process.SECONDS", 0.5)
    with (
        served(FakeEngine(template=CHAT), trust_request_chat_template=True) as server,
        httpx.Client(base_url=server.url, timeout=20) as http,
    ):
        body = {"messages": HELLO, "chat_template": template or "{# #}"}
        assert says in refused(http.post("/v1/chat/completions", json=body), "messages" if not template else None)


def test_others_are_answered_while_a_template_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serried.text.template_process.SECONDS", 4)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with served(chat_template=loop) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        chat = threading.Thread(target=lambda: http.post("/v1/chat/completions", json={"messages": HELLO}))
        chat.start()
        time.sleep(0.2)
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=20).status_code == 200
        assert chat.is_alive()
        chat.join()


TOKENIZE: list[tuple[str, dict[str, Any], str | None]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "x"}, "tokens"),
    ("/detokenize", {"tokens": [512]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [10**30]}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), TOKENIZE, ids=lambda value: str(value)[:40])
def test_tokenize(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    refused(http.post(path, json=body), param)
