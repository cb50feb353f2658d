"""LLM: what each sampling parameter does to an answer, and what an answer tells about it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_sampler import log_softmax
from tiny_models import TEXT, Models

from serried import LLM, SamplingParams
from serried.engine.outputs import CompletionOutput, Logprob
from serried.errors import InputError

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
DRAWN = {"temperature": 1.0, "seed": 7, "max_tokens": 16, "ignore_eos": True}
END = 2  # the model's end token


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


def answer(llm: LLM, prompt: Any = TEXT[0], **params: Any) -> CompletionOutput:
    (output,) = llm.generate(prompt, SamplingParams(**params))
    (only,) = output.outputs
    return only


def decode(llm: LLM, ids: list[int], skip_special: bool = True) -> str:
    assert llm.tokenizer is not None
    return llm.tokenizer.decode(ids, skip_special)


# --- Several answers ---


def test_n_answers(llm: LLM) -> None:
    """Different ones, of which the first is that of n = 1; the same again with the same seed, in any company."""
    asked = SamplingParams(**DRAWN, n=4)
    output, other = llm.generate(TEXT[:2], asked)
    assert output.finished
    assert [each.index for each in output.outputs] == [0, 1, 2, 3]
    found = [each.token_ids for each in output.outputs]
    assert len({*map(tuple, found)}) == 4
    assert found[0] == answer(llm, **DRAWN).token_ids
    assert [each.token_ids for each in llm.generate(TEXT[0], asked)[0].outputs] == found
    assert all(each.text == decode(llm, each.token_ids) for each in (*output.outputs, *other.outputs))
    unseeded = llm.generate(TEXT[0], SamplingParams(temperature=1.0, n=3, ignore_eos=True))[0]
    assert len({tuple(each.token_ids) for each in unseeded.outputs}) == 3


def test_n_answers_come_in_pieces(llm: LLM) -> None:
    """Each piece says of which answer it is; the prompt is finished when all its answers are."""
    pieces: dict[tuple[int, int], str] = {}
    ended = 0
    params = SamplingParams(**{**DRAWN, "ignore_eos": False, "max_tokens": 30}, n=3, stop=["e", "q"])
    for delta in llm.stream(TEXT[:2], params):
        key = delta.index, delta.completion.index
        pieces[key] = pieces.get(key, "") + delta.text
        assert delta.completion.text == pieces[key]
        assert delta.completion is delta.output.outputs[key[1]]
        ended += delta.completion.finish_reason is not None
        assert delta.output.finished == all(each.finish_reason for each in delta.output.outputs)
    assert ended == len(pieces) == 6


def test_parameters_for_each_prompt(llm: LLM) -> None:
    several = [SamplingParams(**GREEDY), SamplingParams(**DRAWN, n=2), SamplingParams(**DRAWN, logprobs=1)]
    outputs = llm.generate(TEXT, several)
    assert [len(output.outputs) for output in outputs] == [1, 2, 1]
    for text, params, output in zip(TEXT, several, outputs, strict=True):
        alone = llm.generate(text, params)[0]
        assert [each.token_ids for each in alone.outputs] == [each.token_ids for each in output.outputs]
        assert [each.logprobs is None for each in output.outputs] == [params.logprobs is None] * params.n
    with pytest.raises(InputError, match="2 SamplingParams for 3 prompts"):
        llm.generate(TEXT, several[:2])


# --- Log-probabilities ---


def plain_logprobs(tiny: Models, ids: list[int]) -> Any:
    """transformers' log-probabilities after each token: float64 [tokens, vocabulary]."""
    import torch

    with torch.inference_mode():
        return log_softmax(tiny.model("split-text")(torch.tensor([ids])).logits[0].numpy())


@pytest.mark.parametrize(
    "params", [GREEDY, DRAWN, {**DRAWN, "top_k": 1}, {**DRAWN, "presence_penalty": 2.0, "min_p": 1}]
)
def test_logprobs_are_the_models_own(tiny: Models, llm: LLM, params: dict[str, Any]) -> None:
    """Of every token, whatever was done before it was chosen, and of the likeliest three."""
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.encode(TEXT[0])
    found = answer(llm, prompt, **params, logprobs=3)
    assert found.logprobs is not None
    table = plain_logprobs(tiny, [*prompt, *found.token_ids])[len(prompt) - 1 :]
    for token, entries, wanted in zip(found.token_ids, found.logprobs, table, strict=False):
        assert list(entries) == [token, *(i for i in np.argsort(-wanted)[:3].tolist() if i != token)]
        for i, each in entries.items():
            assert each.logprob == pytest.approx(wanted[i], abs=1e-4)
            assert each.rank == 1 + (wanted > wanted[i]).sum()
            assert each.decoded_token == llm.tokenizer.token_bytes(i).decode(errors="replace")
    assert len(found.logprobs) == len(found.token_ids)
    own = [entries[token].logprob for token, entries in zip(found.token_ids, found.logprobs, strict=True)]
    assert found.cumulative_logprob == sum(own)
    assert all(math.isfinite(each.logprob) for entries in found.logprobs for each in entries.values())


def test_logprobs_of_the_token_alone(llm: LLM) -> None:
    found = answer(llm, **DRAWN, logprobs=0)
    assert found.logprobs is not None
    assert [list(entries) for entries in found.logprobs] == [[token] for token in found.token_ids]
    without = answer(llm, **DRAWN)
    assert (without.logprobs, without.cumulative_logprob) == (None, None)
    assert without.token_ids == found.token_ids
    more = answer(llm, **DRAWN, logprobs=1000)  # more than there are
    assert more.logprobs is not None
    assert {len(entries) for entries in more.logprobs} == {llm.source.config.vocab_size}


def test_prompt_logprobs(tiny: Models, llm: LLM) -> None:
    """None for the first token; the same with n answers, and where the prompt goes in chunks."""
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.encode(TEXT[1])
    table = plain_logprobs(tiny, prompt)
    small = open_llm(tiny.directory("split-text"), max_num_batched_tokens=16)
    small.core.scheduler.score_budget = 5
    for engine, n in ((llm, 1), (llm, 3), (small, 1)):
        (output,) = engine.generate([prompt], SamplingParams(**DRAWN, n=n, prompt_logprobs=2))
        assert output.prompt_logprobs is not None
        first, *others = output.prompt_logprobs
        assert first is None
        for token, entries, wanted in zip(prompt[1:], others, table, strict=False):
            assert entries is not None
            assert list(entries) == [token, *(i for i in np.argsort(-wanted)[:2].tolist() if i != token)]
            assert all(each.logprob == pytest.approx(wanted[i], abs=1e-4) for i, each in entries.items())
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.outputs[0].token_ids == answer(llm, prompt, **DRAWN).token_ids
        assert output.outputs[0].logprobs is None
    assert llm.generate([prompt], SamplingParams(**DRAWN))[0].prompt_logprobs is None
    (short,) = llm.generate([[5]], SamplingParams(**DRAWN, prompt_logprobs=2))
    assert short.prompt_logprobs == [None]


def test_a_model_without_a_tokenizer_spells_nothing(tiny: Models) -> None:
    other = open_llm(tiny.directory("llama-tied"))
    found = answer(other, [3, 4], **DRAWN, logprobs=1, bad_words=[[5]])
    assert found.logprobs is not None
    assert all(isinstance(each, Logprob) and each.decoded_token is None for each in found.logprobs[0].values())
    with pytest.raises(InputError, match="no tokenizer"):
        other.generate([3], SamplingParams(bad_words=["x"]))


# --- What may be said ---


def test_a_bias_and_what_is_allowed(llm: LLM) -> None:
    assert set(answer(llm, **DRAWN, allowed_token_ids=[40, 50, 60]).token_ids) <= {40, 50, 60}
    assert answer(llm, **GREEDY, logit_bias={77: 100}).token_ids == [77] * 24
    whole = answer(llm, **GREEDY).token_ids
    assert whole[0] not in answer(llm, **GREEDY, logit_bias=dict.fromkeys(whole, -100.0)).token_ids


def test_penalties(llm: LLM) -> None:
    """Strong ones, among few tokens: none comes again before all have come."""
    few = {**GREEDY, "max_tokens": 5, "allowed_token_ids": [40, 50, 60, 70, 80]}
    assert len(set(answer(llm, [3, 4], **few).token_ids)) < 5
    loud = answer(llm, [3, 4], **few, presence_penalty=2.0, frequency_penalty=2.0).token_ids
    assert len(set(loud)) > len(set(answer(llm, [3, 4], **few).token_ids))
    assert sorted(answer(llm, [3, 4], **few, repetition_penalty=1e9).token_ids) != loud


def test_bad_words(llm: LLM) -> None:
    """As text, with and without a space before it, and as token ids; a longer one as a sequence only."""
    assert llm.tokenizer is not None
    whole = answer(llm, **DRAWN).token_ids
    pair = whole[4:6]
    cut = answer(llm, **DRAWN, bad_words=[pair]).token_ids
    assert cut[:5] == whole[:5]
    assert cut[5] != whole[5]
    assert not any(cut[i : i + 2] == pair for i in range(len(cut)))
    loud = {**GREEDY, "logit_bias": dict.fromkeys(llm.tokenizer.encode(" the") + llm.tokenizer.encode("the"), 50.0)}
    assert "the" in answer(llm, **loud).text
    assert "the" not in answer(llm, **loud, bad_words=["the"]).text
    assert "the" not in answer(llm, **loud, bad_words=[" the"]).text
    end = {**GREEDY, "logit_bias": {END: 100}}
    assert set(answer(llm, **end).token_ids) == {END}
    assert END not in answer(llm, **end, bad_words=[decode(llm, [END], False)]).token_ids


def test_where_no_token_is_allowed(llm: LLM) -> None:
    """At the door where it can be known; else the request ends, says why, and the others go on."""
    for params in ({"bad_words": [[40]]}, {"min_tokens": 1, "stop_token_ids": [40]}):
        with pytest.raises(InputError, match="every token that is allowed is forbidden"):
            llm.generate(TEXT[0], SamplingParams(allowed_token_ids=[40], **params))
    stuck = SamplingParams(allowed_token_ids=[40], bad_words=[[40, 40]], seed=1, logprobs=1, stop=["zz"])
    fine = SamplingParams(**DRAWN)
    for params in (stuck, SamplingParams(allowed_token_ids=[40], bad_words=[[40, 40]], temperature=0)):
        first, second = llm.generate(TEXT[:2], [params, fine])
        (ended,) = first.outputs
        assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([40], "abort", "no token is allowed")
        assert ended.text == decode(llm, [40])
        assert first.finished
        assert second.outputs[0].token_ids == answer(llm, TEXT[1], **DRAWN).token_ids


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"stop_token_ids": [320]}, "stop_token_ids: token id 320 is not in the vocabulary of 320"),
        ({"allowed_token_ids": [3, 999]}, "allowed_token_ids: token id 999"),
        ({"logit_bias": {320: 1.0}}, "logit_bias: token id 320"),
        ({"bad_words": [[3, 320]]}, "bad_words: token id 320"),
        ({"bad_words": ["half \ud83d"]}, "surrogate"),
    ],
)
def test_what_the_vocabulary_lacks(llm: LLM, params: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        llm.generate(TEXT[:2], SamplingParams(**params, n=2))


# --- When it ends ---


def test_min_tokens(llm: LLM) -> None:
    """End and stop tokens are not even chosen before; after that they end it."""
    eager = {**GREEDY, "ignore_eos": False, "logit_bias": {END: 100, 50: 90}, "stop_token_ids": [50]}
    assert answer(llm, **eager).token_ids == [END]
    found = answer(llm, **eager, min_tokens=6)
    assert (len(found.token_ids), found.token_ids[-1], found.finish_reason) == (7, END, "stop")
    assert not {END, 50} & set(found.token_ids[:6])


def test_min_tokens_holds_stop_strings_back(llm: LLM) -> None:
    """One that is complete before does not count; the next one does."""
    whole = answer(llm, **GREEDY)
    stop = whole.text[2]
    early = answer(llm, **GREEDY, stop=[stop])
    assert early.text == whole.text[: whole.text.index(stop)]
    late = answer(llm, **GREEDY, stop=[stop], min_tokens=len(early.token_ids))
    assert late.token_ids[: len(early.token_ids)] == early.token_ids
    assert late.text.startswith(early.text + stop)
    assert len(late.token_ids) > len(early.token_ids)


def test_what_ended_it_may_stay_in_the_text(llm: LLM) -> None:
    whole = answer(llm, **GREEDY)
    stop = whole.text[4:7]
    cut = answer(llm, **GREEDY, stop=[stop], include_stop_str_in_output=True)
    assert cut.text == whole.text[: whole.text.index(stop)] + stop
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    token = whole.token_ids[5]
    at = whole.token_ids.index(token)
    kept = answer(llm, **GREEDY, stop_token_ids=[token], include_stop_str_in_output=True)
    assert kept.text == decode(llm, whole.token_ids[: at + 1])
    shown = "".join(
        delta.text
        for delta in llm.stream(TEXT[0], SamplingParams(**GREEDY, stop=[stop], include_stop_str_in_output=True))
    )
    assert shown == cut.text


def test_special_tokens_in_the_text(llm: LLM) -> None:
    loud = {**GREEDY, "logit_bias": {END: 100}, "max_tokens": 2}
    assert answer(llm, **loud).text == ""
    assert answer(llm, **loud, skip_special_tokens=False).text == decode(llm, [END], False) * 2 != ""
