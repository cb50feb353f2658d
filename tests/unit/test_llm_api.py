"""LLM: what it takes, what it gives, and that nothing which goes wrong leaves anything behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TEXT, Models, edited_json

import serried
from serried import LLM, SamplingParams
from serried.engine.outputs import CompletionOutput, RequestOutput
from serried.errors import InputError

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def open_llm(path: Path, **options: Any) -> LLM:
    return LLM(str(path), **{"dtype": "float32", "backend": "torch", "block_size": 8, "threads_per_rank": 1, **options})


@pytest.fixture(scope="module")
def llm(tiny: Models) -> Iterator[LLM]:
    with open_llm(tiny.directory("split-text")) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    """After each test no request waits or runs, and every cache block is free."""
    yield
    assert llm.core.idle
    assert llm.core.scheduler.pool.free == llm.core.scheduler.pool.blocks


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_prompts_of_every_shape(llm: LLM) -> None:
    assert llm.tokenizer is not None
    first, second = (llm.tokenizer.encode(text) for text in TEXT[:2])
    wanted = ids(llm.generate([first, second], GREEDY))
    assert wanted[0] != wanted[1]
    assert ids(llm.generate(TEXT[0], GREEDY)) == ids(llm.generate(first, GREEDY)) == wanted[:1]
    assert ids(llm.generate(tuple(first), GREEDY)) == wanted[:1]
    assert ids(llm.generate(TEXT[:2], GREEDY)) == ids(llm.generate([TEXT[0], second], GREEDY)) == wanted
    assert llm.generate([], GREEDY) == []


def test_the_shape_of_an_answer(llm: LLM) -> None:
    (output,) = llm.generate(TEXT[0], GREEDY)
    assert (output.prompt, output.finished) == (TEXT[0], True)
    assert llm.tokenizer is not None
    assert output.prompt_token_ids == llm.tokenizer.encode(TEXT[0])
    (answer,) = output.outputs
    assert isinstance(answer, CompletionOutput)
    assert (answer.index, answer.finish_reason, answer.stop_reason) == (0, "length", None)
    assert len(answer.token_ids) == 24
    assert answer.text == llm.tokenizer.decode(answer.token_ids)
    assert llm.generate([3, 4], GREEDY)[0].prompt is None


def test_the_default_parameters_are_vllms(llm: LLM) -> None:
    assert len(llm.generate([3, 4])[0].outputs[0].token_ids) <= 16
    assert SamplingParams().temperature == 1.0


@pytest.mark.parametrize("stop", [(), ("zz",), ("e",)])
def test_streamed_text_joined_is_the_whole(llm: LLM, stop: tuple[str, ...]) -> None:
    """A random model writes broken UTF-8, which comes as it would at once; each token comes in a delta of its own."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, stop=stop)
    pieces: dict[int, str] = {}
    counts: dict[int, int] = {}
    for delta in llm.stream(TEXT, params):
        pieces[delta.index] = pieces.get(delta.index, "") + delta.text
        counts[delta.index] = counts.get(delta.index, 0) + 1
        assert delta.output.outputs[0].text == pieces[delta.index]
    outputs = llm.generate(TEXT, params)
    assert [pieces[i] for i in range(len(TEXT))] == [output.outputs[0].text for output in outputs]
    assert [counts[i] for i in range(len(TEXT))] == [len(output.outputs[0].token_ids) for output in outputs]


def test_a_stop_string_over_several_tokens(llm: LLM) -> None:
    """It ends the text, and not a character of it is ever shown."""
    whole = llm.generate(TEXT[1], GREEDY)[0].outputs[0]
    assert llm.tokenizer is not None
    edge = len(llm.tokenizer.decode(whole.token_ids[:10]))
    stop = whole.text[edge - 2 : edge + 2]
    cut = whole.text.index(stop)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=["never said", stop])
    shown = ""
    for delta in llm.stream(TEXT[1], params):
        shown += delta.text
        assert whole.text[:cut].startswith(shown)
    answer = delta.output.outputs[0]
    assert shown == answer.text == whole.text[:cut]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert len(answer.token_ids) < 24


def test_a_stop_token(llm: LLM) -> None:
    """It is among the tokens, and not in the text."""
    whole = llm.generate(TEXT[0], GREEDY)[0].outputs[0].token_ids
    token = next(t for i, t in reversed(list(enumerate(whole))) if t not in whole[:i])
    at = whole.index(token)
    answer = llm.generate(TEXT[0], SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[token]))[0].outputs[0]
    assert answer.token_ids == whole[: at + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", token)
    assert llm.tokenizer is not None
    assert answer.text == llm.tokenizer.decode(whole[:at])


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_end_tokens(tiny: Models, file: str, llm: LLM, tmp_path: Path) -> None:
    """Of either file, one or a list; ignored where that is asked for."""
    whole = llm.generate(TEXT[0], GREEDY)[0].outputs[0].token_ids
    token = next(t for i, t in reversed(list(enumerate(whole))) if t not in whole[:i])
    path = tiny.copy("split-text", tmp_path)
    with edited_json(path / file) as config:
        config["eos_token_id"] = [319, token]
    other = open_llm(path)
    answer = other.generate(TEXT[0], SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
    assert answer.token_ids == whole[: whole.index(token) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert ids(other.generate(TEXT[0], GREEDY)) == [whole]


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello <|im_end|>"}]
    (output,) = llm.chat(messages, GREEDY)
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.decode(output.prompt_token_ids, skip_special=False)
    assert prompt == "<|im_start|>user\nhello <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    end = llm.tokenizer.control_literals["<|im_end|>"]
    assert output.prompt_token_ids.count(end) == 1, "the user's text became a control token"
    assert ids(llm.chat([messages, messages], GREEDY)) == ids([output, output])


def test_a_stream_left_early_frees_its_blocks(llm: LLM) -> None:
    pieces = llm.stream(TEXT, GREEDY)
    next(pieces)
    assert not llm.core.idle
    pieces.close()
    assert llm.core.idle
    assert ids(llm.generate(TEXT[0], GREEDY)) == ids(llm.generate(TEXT[0], GREEDY))


def test_a_stream_within_a_stream(llm: LLM) -> None:
    """Two streams of one engine, taken in turn: each gets its own tokens."""
    wanted = ids(llm.generate(TEXT[:2], GREEDY))
    first, second = llm.stream(TEXT[0], GREEDY), llm.stream(TEXT[1], GREEDY)
    try:
        begun = next(first)
        (other,) = [delta.output for delta in second if delta.output.finished]
        (one,) = [delta.output for delta in first if delta.output.finished]
        assert [other.outputs[0].token_ids, one.outputs[0].token_ids] == wanted[::-1]
        assert begun.index == 0
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ("", {}, "empty"),
        ([[]], {}, "empty"),
        ([3, 320], {}, "token id 320 is not in the vocabulary of 320"),
        ([3, -1], {}, "token id -1"),
        ([3], {"stop_token_ids": [320]}, "token id 320"),
        ([3] * 257, {"max_tokens": 1}, "--max-model-len"),
        ([3] * 200, {"max_tokens": 57}, "--max-model-len"),
        ([[3, 4], [5] * 300], {}, "--max-model-len"),
        ("half \ud83d of a character", {}, "surrogate"),
    ],
)
def test_a_prompt_that_cannot_run(llm: LLM, prompt: Any, params: dict[str, Any], said: str) -> None:
    """An error, not a truncation; requests of the same call that were good are gone too."""
    with pytest.raises(InputError, match=said):
        llm.generate(prompt, SamplingParams(**params))
    assert llm.core.idle


def test_a_prompt_that_just_fits(llm: LLM) -> None:
    (output,) = llm.generate([3] * 255, SamplingParams(max_tokens=1, temperature=0))
    assert len(output.outputs[0].token_ids) == 1
    (output,) = llm.generate([3] * 16, SamplingParams(max_tokens=240, temperature=0, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 240


def test_more_prompts_than_fit_at_once(tiny: Models, llm: LLM) -> None:
    """A small cache, a small budget, few requests at a time: the same tokens, in the order of the prompts."""
    prompts = [[n, n + 1, n + 2] * (n % 5 + 1) for n in range(30)]
    one = SamplingParams(temperature=0.9, seed=3, max_tokens=10, ignore_eos=True)
    small = open_llm(
        tiny.directory("split-text"), kv_cache_memory=100_000, max_num_batched_tokens=7, max_num_seqs=5, block_size=4
    )
    outputs = small.generate(prompts, one)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert ids(outputs) == ids(llm.generate(prompts, one))
    assert small.core.scheduler.pool.blocks < 30


def test_options_that_cannot_work(tiny: Models) -> None:
    path = tiny.directory("split-text")
    for options, said in (
        ({"max_model_len": 257}, "--max-model-len 257: the model's context is 256"),
        ({"kv_cache_memory": 100}, "--kv-cache-memory 100: too small for one block of 8 tokens"),
        ({"max_model_length": 5}, "did you mean max_model_len"),
        ({"tensor_parallel_size": 5}, "legal sizes are 1 to 4"),
        ({"load_format": "pickle"}, "--load-format pickle"),
    ):
        with pytest.raises(InputError, match=said):
            open_llm(path, **options)


def test_a_model_without_a_tokenizer(tiny: Models) -> None:
    """Token ids work; text, stop strings and chat are refused with what would work."""
    other = open_llm(tiny.directory("llama-tied"))
    assert other.generate([3, 4], GREEDY)[0].outputs[0].text == ""
    for call in (
        lambda: other.generate("text", GREEDY),
        lambda: other.generate([3], SamplingParams(stop=["x"])),
        lambda: other.chat([{"role": "user", "content": "hi"}], GREEDY),
    ):
        with pytest.raises(InputError, match=r"no tokenizer.*give token ids"):
            call()
    assert other.core.idle


def test_a_preset_takes_dummy_weights_alone() -> None:
    with pytest.raises(InputError, match="--load-format dummy"):
        LLM("qwen3-0.6b", backend="torch")


def test_what_the_package_offers() -> None:
    assert serried.LLM is LLM
    assert serried.SamplingParams is SamplingParams
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        serried.Llm  # noqa: B018
