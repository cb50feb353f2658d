"""LangChain and LiteLLM against the server: answers, streams, tools, structured output, keys, a full queue, TLS."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from certificates import certificate
from fakes import HERMES, FakeEngine, Served, served
from needs import need
from pydantic import BaseModel

from serried.errors import QueueFull

need("langchain_openai", "litellm")
# Neither of them may ask the world for prices or send traces.
os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", LANGSMITH_TRACING="false")
import litellm  # noqa: E402
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage  # noqa: E402
from langchain_openai import ChatOpenAI, OpenAI  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*ReadOnly.*:UserWarning"),  # of litellm's own types
    pytest.mark.filterwarnings("ignore:Accessing the 'model_"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings"),  # of openai's
]
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
HELLO = [{"role": "user", "content": "Hello"}]


class City(BaseModel):
    """A city."""

    name: str
    people: int


def weather(city: str, days: int) -> str:
    """The weather of the next days.

    city: its name. days: how many.
    """
    return f"{city}: rain for {days} days"


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with served(FakeEngine(template=HERMES)) as running:
        yield running


@pytest.fixture
def chat(server: Served) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="tiny", max_retries=0, timeout=20)  # type: ignore[arg-type]


def lite(server: Served, **fields: Any) -> Any:
    given = {"model": "openai/tiny", "api_base": f"{server.url}/v1", "api_key": "none", "messages": HELLO}
    return litellm.completion(**{**given, "num_retries": 0, "timeout": 20, **fields})


def test_langchain_asks_and_streams(server: Served, chat: ChatOpenAI) -> None:
    messages = [SystemMessage("Be brief."), HumanMessage("Hello")]
    whole = chat.invoke(messages)
    assert "and no other" in whole.content
    assert whole.usage_metadata is not None and whole.usage_metadata["input_tokens"] > 5
    assert whole.response_metadata["finish_reason"] == "stop"
    pieces = list(chat.stream(messages, stream_usage=True))
    assert len(pieces) > 3
    text = "".join(str(piece.content) for piece in pieces)
    assert text == whole.content
    assert sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces) > 5  # type: ignore[misc]
    assert [reply.content for reply in chat.batch([messages, messages])] == [text, text]


def test_langchain_hands_on_its_options(server: Served, chat: ChatOpenAI) -> None:
    chosen = chat.bind(temperature=0.5, top_p=0.9, seed=3, max_tokens=6, stop=["END"], logprobs=True, top_logprobs=2)
    reply = chosen.invoke("Hello")
    params = server.engine.asked[-1]["params"]
    assert (params.temperature, params.top_p, params.seed, params.max_tokens) == (0.5, 0.9, 3, 6)
    assert params.stop == ("END",)
    assert len(reply.response_metadata["logprobs"]["content"]) == 6
    assert reply.response_metadata["finish_reason"] == "length"


def test_langchain_calls_a_tool_and_gives_back_what_it_said(server: Served, chat: ChatOpenAI) -> None:
    server.engine.say = lambda prompt, index: WEATHER
    bound = chat.bind_tools([weather])
    question = HumanMessage("Will it rain in Oslo?")
    for reply in (bound.invoke([question]), _joined(bound.stream([question]))):
        (call,) = reply.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Oslo", "days": 2})
        assert reply.content == "" and reply.response_metadata["finish_reason"] == "tool_calls"
    server.engine.say = lambda prompt, index: "It will."
    said = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    assert bound.invoke([question, reply, said]).content == "It will."
    forced = chat.bind_tools([weather], tool_choice="weather")
    server.engine.say = lambda prompt, index: WEATHER
    assert forced.invoke([question]).tool_calls[0]["name"] == "weather"
    assert server.engine.asked[-1]["grammar"] is not None


def _joined(pieces: Iterator[Any]) -> Any:
    whole = next(pieces)
    for piece in pieces:
        whole += piece
    return whole


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_gets_an_object(server: Served, chat: ChatOpenAI, method: Any) -> None:
    value = '{"name": "Oslo", "people": 700000}'
    call = f'<tool_call>\n{{"name": "City", "arguments": {value}}}\n</tool_call>'
    server.engine.say = lambda prompt, index: call if method == "function_calling" else value
    found = chat.with_structured_output(City, method=method).invoke("A city, as JSON")
    assert found == City(name="Oslo", people=700000)
    grammar = server.engine.asked[-1]["grammar"]
    assert grammar is not None


def test_langchain_by_the_responses_route(server: Served, chat: ChatOpenAI) -> None:
    responses = chat.model_copy(update={"use_responses_api": True})
    assert "and no other" in responses.invoke("Hello").text
    assert "and no other" in "".join(piece.text for piece in responses.stream("Hello"))


def test_langchain_completes(server: Served) -> None:
    model = OpenAI(base_url=f"{server.url}/v1", api_key="none", model="tiny", max_retries=0, max_tokens=30)  # type: ignore[arg-type]
    assert "the answer" in model.invoke("one two")
    assert "the answer" in "".join(model.stream("one two"))


async def _langchain_async(chat: ChatOpenAI) -> tuple[str, str]:
    return str((await chat.ainvoke("Hello")).content), "".join([str(p.content) async for p in chat.astream("Hello")])


def test_langchain_without_threads(server: Served, chat: ChatOpenAI) -> None:
    import asyncio

    whole, streamed = asyncio.run(_langchain_async(chat))
    assert whole == streamed and "and no other" in whole


def test_litellm_asks_and_streams(server: Served) -> None:
    whole = lite(server, temperature=0.5, seed=3)
    text = whole.choices[0].message.content
    assert "and no other" in text and whole.usage.prompt_tokens > 5
    assert server.engine.asked[-1]["params"].seed == 3
    pieces = list(lite(server, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == text
    assert len(pieces) > 3


def test_litellm_calls_a_tool(server: Served) -> None:
    server.engine.say = lambda prompt, index: WEATHER
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    message = lite(server, tools=[tool]).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo", "days": 2}
    pieces = lite(server, tools=[tool], stream=True)
    calls = [call for piece in pieces for call in piece.choices[0].delta.tool_calls or []]
    assert calls[0].function.name == "weather"
    assert json.loads("".join(call.function.arguments or "" for call in calls)) == {"city": "Oslo", "days": 2}


def test_litellm_speaks_the_other_dialects(server: Served) -> None:
    """As an Anthropic server, as a vLLM, as text completions."""
    claude = litellm.completion(
        model="anthropic/tiny", api_base=server.url, api_key="none", messages=HELLO, max_tokens=60, timeout=20
    )
    assert "and no other" in claude.choices[0].message.content
    assert "and no other" in lite(server, model="hosted_vllm/tiny").choices[0].message.content
    text = litellm.text_completion(
        model="text-completion-openai/tiny", api_base=f"{server.url}/v1", api_key="none", prompt="one two", timeout=20
    )
    assert "the answer" in text.choices[0].text


def test_what_is_wrong_is_told_in_the_clients_own_errors(server: Served, chat: ChatOpenAI) -> None:
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        lite(server, top_p=7.0)
    with pytest.raises(litellm.NotFoundError, match="other"):
        lite(server, model="openai/other")
    with pytest.raises(openai.BadRequestError, match="top_p"):
        chat.invoke("x", top_p=7.0)


def test_keys() -> None:
    with served(api_key=("one", "two")) as locked:
        url = f"{locked.url}/v1"
        for key in ("one", "two"):
            assert ChatOpenAI(base_url=url, api_key=key, model="tiny").invoke("x").content  # type: ignore[arg-type]
            assert lite(locked, api_key=key).choices[0].message.content
        with pytest.raises(openai.AuthenticationError, match="API key"):
            ChatOpenAI(base_url=url, api_key="three", model="tiny").invoke("x")  # type: ignore[arg-type]
        with pytest.raises(litellm.AuthenticationError, match="API key"):
            lite(locked, api_key="three")


def test_a_full_queue_is_a_rate_limit_and_tried_again(server: Served, chat: ChatOpenAI) -> None:
    server.engine.error = QueueFull(7, 1.0)
    with pytest.raises(openai.RateLimitError, match="requests are waiting"):
        chat.invoke("x")
    with pytest.raises(litellm.RateLimitError, match="requests are waiting"):
        lite(server, max_retries=0)
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude,
        pytest.raises(anthropic.RateLimitError, match="requests are waiting"),
    ):
        claude.messages.create(model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=9)
    # Clients wait for as long as Retry-After says: the second try finds room.
    tries = []

    def recover(request: httpx.Request) -> None:
        tries.append(request.headers["x-stainless-retry-count"])
        if len(tries) == 2:
            server.engine.error = None

    with (
        httpx.Client(event_hooks={"request": [recover]}) as http,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2, http_client=http) as client,
    ):
        assert client.completions.create(model="tiny", prompt="x").choices[0].text
    assert tries == ["0", "1"]


def test_tls(tmp_path: Path) -> None:
    """Every client by a certificate that it was told to trust; none without."""
    keyfile, certfile = certificate(tmp_path)
    with served(ssl_keyfile=keyfile, ssl_certfile=certfile, api_key=("k",)) as server:
        trust = ssl.create_default_context(cafile=certfile)
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key="k", http_client=openai.DefaultHttpxClient(verify=trust)) as client:
            pieces = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)  # type: ignore[arg-type, call-overload]
            assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        trusting = anthropic.DefaultHttpxClient(verify=trust)
        with anthropic.Anthropic(base_url=server.url, api_key="k", http_client=trusting) as claude:
            assert claude.messages.create(model="tiny", messages=HELLO, max_tokens=9).content  # type: ignore[arg-type]
        chat = ChatOpenAI(base_url=url, api_key="k", model="tiny", http_client=httpx.Client(verify=trust))  # type: ignore[arg-type]
        assert chat.invoke("x").content
        with (
            openai.OpenAI(base_url=url, api_key="k", max_retries=0) as client,
            pytest.raises(openai.APIConnectionError),
        ):
            client.models.list()
