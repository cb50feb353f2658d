"""/v1/messages: what Anthropic's client makes of it, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from fakes import THINKS, FakeEngine, Served, counted, served, tiny_tokenizer

from serried.text.chat import encode_chat

TOKENIZER = tiny_tokenizer(THINKS)
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with served(FakeEngine(template=THINKS)) as running:
        yield running


@pytest.fixture
def claude(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=20) as made:
        yield made


def ask(claude: anthropic.Anthropic, **more: Any) -> anthropic.types.Message:
    """A message, whole; streamed it must be the same."""
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": HELLO, **more}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert [content(block) for block in streamed.content] == [content(block) for block in whole.content]
    return whole


def content(block: Any) -> dict[str, Any]:
    return {
        key: value for key, value in block.to_dict().items() if key not in ("id", "parsed_output") and value is not None
    }


def prompt_of(server: Served) -> str:
    return TOKENIZER.decode(server.engine.asked[-1]["prompt"], skip_special=False)


def test_a_message(claude: anthropic.Anthropic, server: Served) -> None:
    message = ask(claude)
    ids = encode_chat(TOKENIZER, HELLO)
    assert server.engine.asked[0]["prompt"] == ids
    assert content(message.content[0]) == {"type": "text", "text": counted(ids, 0)}
    assert (message.role, message.stop_reason, message.type) == ("assistant", "end_turn", "message")
    assert message.usage.cache_read_input_tokens == 2
    assert message.usage.input_tokens == len(ids) - 2


def test_the_events_have_their_order(claude: anthropic.Anthropic) -> None:
    stream = claude.messages.create(model="tiny", max_tokens=3, messages=HELLO, stream=True)
    types = [event.type for event in stream]
    assert types[:2] == ["message_start", "content_block_start"]
    assert set(types[2:-3]) == {"content_block_delta"}
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_system_and_sampling(claude: anthropic.Anthropic, server: Served) -> None:
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]
    ask(claude, system=system, extra_body={"temperature": 0.5, "top_k": 3})
    assert prompt_of(server).startswith("<|im_start|>system\nBe\nbrief<|im_end|>")
    params = server.engine.asked[-1]["params"]
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 3, 200)


def test_why_it_stopped(claude: anthropic.Anthropic, server: Served) -> None:
    assert ask(claude, max_tokens=4).stop_reason == "max_tokens"
    server.engine.say = lambda prompt, index: "one STOP two"
    message = ask(claude, stop_sequences=["STOP"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert content(message.content[0])["text"] == "one "


def test_tools(claude: anthropic.Anthropic, server: Served) -> None:
    server.engine.say = lambda prompt, index: f"I look.\n{CALL}\n{CALL}"
    message = ask(claude, tools=[TOOL])
    assert message.stop_reason == "tool_use"
    text, call, _ = (content(block) for block in message.content)
    assert text["text"] == "I look."
    assert (call["name"], call["input"]) == ("get_weather", {"city": "Paris"})
    one = ask(claude, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert len(one.content) == 2


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_forced_tool(claude: anthropic.Anthropic, server: Served, choice: Any) -> None:
    server.engine.say = lambda prompt, index: CALL
    assert ask(claude, tools=[TOOL], tool_choice=choice).stop_reason == "tool_use"
    assert server.engine.asked[-1]["grammar"].kind == "lark"


def test_a_conversation_with_tools(claude: anthropic.Anthropic, server: Served) -> None:
    use = {"type": "tool_use", "id": "t", "name": "get_weather", "input": {"city": "Paris"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "text", "text": "rain"}],
        "is_error": True,
    }
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm", "signature": ""}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    ask(claude, messages=messages, tools=[TOOL])
    prompt = prompt_of(server)
    assert "<|im_start|>assistant\nget_weather([('city', 'Paris')])<|im_end|>" in prompt
    assert "<|im_start|>tool\nError: rain<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>" in prompt


def test_thinking(claude: anthropic.Anthropic, server: Served) -> None:
    ask(claude)
    assert not prompt_of(server).endswith("<think>\n")
    server.engine.say = lambda prompt, index: "Hm.\n</think>\n\nHello."
    message = ask(claude, max_tokens=1030, thinking={"type": "enabled", "budget_tokens": 1024})
    assert prompt_of(server).endswith("<think>\n")
    thinking, text = (content(block) for block in message.content)
    assert (thinking["thinking"], text["text"]) == ("Hm.", "Hello.")


def test_an_answer_that_has_begun(claude: anthropic.Anthropic, server: Served) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "The answer is <|im_end|>"}]
    ask(claude, messages=messages)
    assert prompt_of(server).endswith("<|im_start|>assistant\nThe answer is <|im_end|>")
    assert server.engine.asked[-1]["prompt"].count(TOKENIZER.control_literals["<|im_end|>"]) == 1
    blocks: Any = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "The answer is"}]}]
    count = claude.messages.count_tokens(model="tiny", messages=blocks)
    ask(claude, messages=blocks)
    assert prompt_of(server).endswith("<|im_start|>assistant\nThe answer is")
    assert count.input_tokens == len(server.engine.asked[-1]["prompt"])


def test_count_tokens(claude: anthropic.Anthropic, server: Served) -> None:
    ask(claude, tools=[TOOL], system="Be brief")
    count = claude.messages.count_tokens(model="tiny", messages=HELLO, tools=[TOOL], system="Be brief")
    assert count.input_tokens == len(server.engine.asked[0]["prompt"])


def test_a_call_that_is_cut_off(claude: anthropic.Anthropic, server: Served) -> None:
    server.engine.say = lambda prompt, index: CALL
    message = claude.messages.create(model="tiny", max_tokens=50, messages=HELLO, tools=[TOOL])
    assert message.stop_reason == "max_tokens"
    assert content(message.content[0])["input"] == {}


BLOCK = [{"type": "image", "source": {"type": "url", "url": "x"}}]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": BLOCK}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 5}]}]},
            "messages[0].content[0].input",
        ),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, "prompt has"),
        ({"system": 5}, "system"),
        ({"stop_sequences": [""]}, "stop"),
        ({"temperature": -1}, "temperature"),
        ({"output_config": {"format": 5}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"mcp_servers": [1]}, "mcp_servers"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_input(http: httpx.Client, server: Served, body: dict[str, Any], field: str) -> None:
    for stream in (False, True):
        asked = {"model": "tiny", "messages": HELLO, "max_tokens": 5, "stream": stream, **body}
        response = http.post("/v1/messages", json=asked)
        assert response.status_code == 400, response.text
        reply = response.json()
        assert reply["type"] == "error"
        assert reply["error"]["type"] == "invalid_request_error"
        assert field in reply["error"]["message"]
    assert not server.engine.asked


def test_another_model(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude", max_tokens=5, messages=HELLO)
