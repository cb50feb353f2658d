"""/v1/completions: OpenAI's client against the whole server."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from fakes import EOS, FakeEngine, Served, counted, served, tiny_tokenizer

from serried.engine.interface import TokenLogprobs
from serried.server.logprobs import CompletionLogprobs

TOKENIZER = tiny_tokenizer()


def text_of(prompt: str, index: int = 0) -> str:
    return counted(TOKENIZER.encode(prompt), index)


def test_a_completion(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="one two", max_tokens=100)
    (choice,) = reply.choices
    assert choice.text == text_of("one two")
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("stop", 0, None)
    ids = TOKENIZER.encode(choice.text)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(ids) + 1  # and the end token
    assert reply.usage.prompt_tokens == len(TOKENIZER.encode("one two"))
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 2


def test_sixteen_tokens_are_the_default(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="one two")
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_is_whole(client: openai.OpenAI, n: int) -> None:
    asked = {"model": "tiny", "prompt": ["one two", "three"], "n": n, "max_tokens": 60, "temperature": 1.0}
    whole = client.completions.create(**asked, logprobs=2)
    texts: dict[int, str] = {}
    tokens: dict[int, list[str]] = {}
    ends: dict[int, str] = {}
    usage = None
    for chunk in client.completions.create(**asked, logprobs=2, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens if choice.logprobs else [])
            if choice.finish_reason:
                assert choice.index not in ends
                ends[choice.index] = choice.finish_reason
    assert [choice.text for choice in whole.choices] == [texts[index] for index in range(2 * n)]
    assert [choice.finish_reason for choice in whole.choices] == [ends[index] for index in range(2 * n)]
    assert [choice.logprobs.tokens for choice in whole.choices if choice.logprobs] == [tokens[i] for i in range(2 * n)]
    assert usage == whole.usage
    assert whole.choices[n].text == text_of("three")


def test_usage_comes_only_when_asked_for(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="tiny", prompt="one", stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_prompts_as_ids(client: openai.OpenAI) -> None:
    ids = TOKENIZER.encode("one two")
    one = client.completions.create(model="tiny", prompt=ids, max_tokens=100)
    many = client.completions.create(model="tiny", prompt=[ids, [5]], max_tokens=100)
    assert one.choices[0].text == many.choices[0].text == text_of("one two")
    assert many.choices[1].text == counted([5], 0)


def test_echo(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="one two", echo=True, max_tokens=100)
    assert reply.choices[0].text == "one two" + text_of("one two")
    ids = client.completions.create(model="tiny", prompt=TOKENIZER.encode("one two"), echo=True, max_tokens=100)
    assert ids.choices[0].text == reply.choices[0].text


def test_echo_with_logprobs(client: openai.OpenAI) -> None:
    ids = TOKENIZER.encode("one two")
    reply = client.completions.create(model="tiny", prompt="one two", echo=True, logprobs=5, max_tokens=60)
    scores, text = reply.choices[0].logprobs, reply.choices[0].text
    assert "prompt_logprobs" not in (reply.choices[0].model_extra or {})  # only who asks for them by name gets them
    assert scores is not None and scores.tokens and scores.text_offset and scores.top_logprobs
    assert scores.token_logprobs and scores.token_logprobs[0] is None
    assert scores.token_logprobs[1:] == [-1.0] * (len(scores.tokens) - 1)
    assert scores.tokens[: len(ids)] == [TOKENIZER.token_bytes(token).decode() for token in ids]
    for token, offset in zip(scores.tokens, scores.text_offset, strict=True):
        assert token.startswith("bytes:") or token == "<|im_end|>" or text[offset:].startswith(token)
    best = scores.top_logprobs[-2]
    assert len(best) == 5 and min(best.values()) == -9999.0  # JSON has no infinity


def test_nothing_but_the_prompt(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="one two", echo=True, logprobs=1, max_tokens=0)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason) == ("one two", "length")
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) == len(TOKENIZER.encode("one two"))


def test_prompt_logprobs(http: httpx.Client) -> None:
    reply = http.post("/v1/completions", json={"prompt": [5, 6, 7], "prompt_logprobs": 1, "max_tokens": 1}).json()
    scores = reply["choices"][0]["prompt_logprobs"]
    assert scores[0] is None
    assert scores[1]["6"] == {"logprob": -1.0, "rank": 2, "decoded_token": TOKENIZER.token_bytes(6).decode()}
    assert scores[2].keys() == {"7", "8"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "kept", "found"),
    [
        (["answer"], "the ", "answer"),
        (["no such", "is that"], "the answer ", "is that"),
        ("other an", "the answer is that there is no ", "other an"),
        (["xyz"], "the answer is that there is no other answer", None),
        (["answer!"], "the answer is that there is no other answer", None),
    ],
)
def test_stop_strings_never_leak(
    server: Served, http: httpx.Client, stream: bool, stop: str | list[str], kept: str, found: str | None
) -> None:
    server.engine.say = lambda prompt, index: "the answer is that there is no other answer"
    body = {"prompt": "one", "stop": stop, "max_tokens": 100, "stream": stream}
    response = http.post("/v1/completions", json=body)
    if stream:
        assert response.headers["content-type"].startswith("text/event-stream")
        choices = [choice for chunk in events(response.text) for choice in chunk["choices"]]
        assert "".join(choice["text"] for choice in choices) == kept
        last = choices[-1]
        assert not any(
            found and found[0] in choice["text"][-1:] and choice["text"].endswith(found) for choice in choices
        )
    else:
        (last,) = response.json()["choices"]
        assert last["text"] == kept
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", found)
    assert server.idle()


def test_a_stop_string_ends_its_own_sample_only(server: Served, client: openai.OpenAI) -> None:
    server.engine.say = lambda prompt, index: "one STOP two three" if index == 0 else "one two three"
    reply = client.completions.create(model="tiny", prompt="x", n=2, stop="STOP", max_tokens=50)
    assert [choice.text for choice in reply.choices] == ["one ", "one two three"]
    assert server.idle()


def test_a_stop_string_may_be_kept(server: Served, http: httpx.Client) -> None:
    server.engine.say = lambda prompt, index: "one STOP two"
    body = {"prompt": "x", "stop": ["STOP"], "include_stop_str_in_output": True, "max_tokens": 50}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "one STOP"


@pytest.mark.parametrize(("least", "text"), [(1, "a"), (2, "a.b"), (3, "a.b"), (4, "a.b.c")])
def test_min_tokens_holds_stop_strings_off(server: Served, http: httpx.Client, least: int, text: str) -> None:
    server.engine.say = lambda prompt, index: "a.b.c.d"
    body = {"prompt": "x", "stop": ["."], "min_tokens": least, "max_tokens": 50}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == text


def test_a_stop_token_is_no_text(server: Served, http: httpx.Client) -> None:
    (token,) = TOKENIZER.encode("x")
    server.engine.say = lambda prompt, index: "ab xcd"
    reply = http.post("/v1/completions", json={"prompt": "y", "stop_token_ids": [token], "max_tokens": 50}).json()
    choice = reply["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab ", "stop", token)


def test_an_emoji_cut_by_max_tokens(server: Served, client: openai.OpenAI) -> None:
    server.engine.say = lambda prompt, index: "😀😀"
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 6}
    whole = client.completions.create(**asked).choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(pieces) == whole == "😀�"


def test_every_parameter_reaches_the_engine(server: Served, http: httpx.Client) -> None:
    given = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "seed": 11,
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 9,
        "logprobs": 3,
        "skip_special_tokens": False,
    }
    body = {
        "prompt": "x",
        "allowed_token_ids": [1, 2],
        "logit_bias": {"5": 1.5},
        "priority": -3,
        "cache_salt": "s",
        "stop_token_ids": [3],
        **given,
    }
    assert http.post("/v1/completions", json=body).status_code == 200
    (asked,) = server.engine.asked
    params = asked["params"]
    assert {name: getattr(params, name) for name in given} == given
    assert params.logit_bias == {5: 1.5}
    assert (tuple(params.stop_token_ids), tuple(params.allowed_token_ids)) == ((3,), (1, 2))
    assert (asked["priority"], asked["salt"]) == (-3, "s")


def test_what_the_model_says_of_sampling_is_the_default() -> None:
    engine = FakeEngine()
    engine.model = engine.model.__class__("tiny", 2048, 512, frozenset({EOS}), {"temperature": 0.25, "top_k": 20})
    with served(engine) as server:
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "temperature": 1, "top_k": 0})
    first, second = (asked["params"] for asked in engine.asked)
    assert (first.temperature, first.top_k) == (0.25, 20)
    assert (second.temperature, second.top_k) == (1.0, 0)


def test_without_a_tokenizer_ids_go_in_and_out() -> None:
    engine = FakeEngine()
    engine.tokenizer = None
    with served(engine, skip_tokenizer_init=True) as server:
        ids = httpx.post(f"{server.url}/v1/completions", json={"prompt": [5, 6], "logprobs": 1}).json()
        text = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        chat = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    (choice,) = ids["choices"]
    assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("", [5, 6, 7, EOS], [5, 6])
    assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:7", f"token_id:{EOS}"]
    assert text.status_code == chat.status_code == 400
    assert "token ids" in text.json()["error"]["message"]


def events(text: str) -> list[dict[str, object]]:
    """The JSON of a stream's events, which end with [DONE]."""
    blocks = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert blocks[-1] == "[DONE]"
    return [json.loads(block) for block in blocks[:-1]]


def test_two_tokens_of_one_text_keep_the_likelier_score() -> None:
    """lm_eval takes a token as the greedy choice where no score beside it is higher."""
    same: Any = SimpleNamespace(token_bytes=lambda token: b"a")
    scores = CompletionLogprobs(same, 1)
    scores.add(5, TokenLogprobs((5, 6), (-1.0, -0.5), (2, 1)), 0)
    assert scores.lists["token_logprobs"] == [-1.0]
    assert scores.lists["top_logprobs"] == [{"a": -0.5}]
