"""Sampling over real ranks against the plain sampler: every token, every log-probability, the same bits everywhere.

The plain sampler (tests/plain_sampler.py) has the whole row of logits of each position, as one rank computes them in
one step; the engines have parts of the vocabulary, chunks and company.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from engine_helpers import PROMPTS, SAMPLED, among_others, open_llm, sampled
from plain_sampler import chosen, edited, log_softmax
from tiny_models import Models

from serried import LLM, SamplingParams
from serried.backends.philox import sample_seed
from serried.engine.batch import build_step
from serried.engine.interface import TokenLogprobs
from serried.engine.outputs import CompletionOutput, RequestOutput
from serried.engine.request import Request
from serried.engine.scheduler import Scheduled

SIZES = (1, 2, 3)
WHOLE = 0  # the engine that gives the plain sampler its logits
KINDS: dict[str, dict[str, Any]] = {
    **SAMPLED,
    "greedy": {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "allowed": {"temperature": 1.0, "top_p": 0.9, "allowed_token_ids": [*range(5, 90, 3)], "repetition_penalty": 0.7},
}


@pytest.fixture(scope="module", params=[("split-5", "bfloat16"), ("split-9-3", "float32")], ids="-".join)
def engines(request: pytest.FixtureRequest, tiny: Models) -> Iterator[dict[int, LLM]]:
    """By their size; the larger ones score fewer positions of a prompt at once. At TP = 3 a rank may have no part."""
    name, dtype = request.param
    with ExitStack() as stack:
        made = {tp: stack.enter_context(open_llm(tiny.directory(name), tp, "native", dtype=dtype)) for tp in SIZES}
        made[2].core.scheduler.score_budget = 7
        made[3].core.scheduler.score_budget = 1
        one = open_llm(tiny.directory(name), 1, "native", dtype=dtype, max_num_batched_tokens=200)
        yield {**made, WHOLE: stack.enter_context(one)}


def whole_logits(llm: LLM, ids: list[int]) -> Any:
    """float32 [tokens, vocabulary], all in one step."""
    pool, size = llm.core.scheduler.pool, llm.config.block_size
    request = Request(0, ids, SamplingParams(), 0, blocks=pool.take(-(-len(ids) // size)) or [])
    logits = llm.executor.execute(build_step([Scheduled(request, 0, len(ids))], size, whole_logits=True)).logits
    pool.give_back(request.blocks)
    return logits


def assert_plain(llm: LLM, prompt: list[int], answer: CompletionOutput, params: SamplingParams) -> Any:
    """Every token is the plain sampler's. Gives the logits of prompt and answer."""
    seed = sample_seed(params.seed or 0, answer.index)
    logits = whole_logits(llm, [*prompt, *answer.token_ids])
    for length, token in enumerate(answer.token_ids):
        said, position = answer.token_ids[:length], len(prompt) + length
        row = edited(logits[position - 1], prompt, said, params, sorted(llm.core.eos_ids), params.bad_words)  # type: ignore[arg-type]
        assert chosen(row, params, seed, position) == token
    return logits


def params_of(kind: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{**KINDS[kind], "seed": 11, "max_tokens": 12, "ignore_eos": True, **more})


def test_tokens_and_logprobs(engines: dict[int, LLM]) -> None:
    """Of every kind of request alone, then of all of them together over each number of ranks."""
    asked = [params_of(kind, logprobs=3, prompt_logprobs=2) for kind in KINDS]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(asked))]
    alone = [engines[1].generate([prompt], params)[0] for prompt, params in zip(prompts, asked, strict=True)]
    for prompt, params, output in zip(prompts, asked, alone, strict=True):
        assert_plain(engines[WHOLE], prompt, output.outputs[0], params)
        assert_plain_logprobs(engines[WHOLE], output)
    for llm in engines.values():
        for output, wanted in zip(llm.generate(prompts, asked), alone, strict=True):
            assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
            assert output.outputs[0].logprobs == wanted.outputs[0].logprobs
            assert output.prompt_logprobs == wanted.prompt_logprobs


def assert_plain_logprobs(llm: LLM, output: RequestOutput) -> None:
    """Of every token after the first, of prompt and answer."""
    (answer,) = output.outputs
    whole = [*output.prompt_token_ids, *answer.token_ids]
    entries = [*(output.prompt_logprobs or [])[1:], *(answer.logprobs or [])]
    for token, each, row in zip(whole[1:], entries, whole_logits(llm, whole)[:-1], strict=True):
        assert each is not None
        assert next(iter(each)) == token
        plain = log_softmax(row)
        assert all(abs(one.logprob - plain[i]) < 1e-12 for i, one in each.items())
        assert all(one.rank == 1 + (row > row[i]).sum() for i, one in each.items())


@pytest.mark.parametrize("kind", ["edited", "allowed"])
def test_among_others(engines: dict[int, LLM], kind: str) -> None:
    """In steps that others share who choose in other ways: the same log-probabilities too."""
    params = params_of(kind, logprobs=3, prompt_logprobs=2)
    (wanted,) = engines[1].generate([PROMPTS[0]], params)
    for llm in engines.values():
        given = among_others(llm, params)
        assert [new.token for new in given] == wanted.outputs[0].token_ids
        assert [by_id(new.logprobs) for new in given] == plain_numbers(wanted.outputs[0].logprobs)
        scores = given[0].request.prompt_logprobs
        assert [by_id(each) for each in scores] == plain_numbers((wanted.prompt_logprobs or [])[1:])


def by_id(scores: TokenLogprobs) -> dict[int, tuple[float, int]]:
    return dict(zip(scores.ids, zip(scores.logprobs, scores.ranks, strict=True), strict=True))


def plain_numbers(entries: Any) -> list[dict[int, tuple[float, int]]]:
    return [{i: (each.logprob, each.rank) for i, each in one.items()} for one in entries]


@pytest.mark.parametrize("kind", ["temperature", "edited"])
def test_n_answers(engines: dict[int, LLM], kind: str) -> None:
    """Each has noise of its own, and is the same everywhere; without a seed no two engines agree."""
    params = sampled(kind, n=3)
    (wanted,) = engines[1].generate([PROMPTS[0]], params)
    assert len({tuple(answer.token_ids) for answer in wanted.outputs}) == 3
    for answer in wanted.outputs:
        assert_plain(engines[WHOLE], PROMPTS[0], answer, params)
    for llm in engines.values():
        (output,) = llm.generate([PROMPTS[0]], params)
        assert [answer.token_ids for answer in output.outputs] == [answer.token_ids for answer in wanted.outputs]
    unseeded = [llm.generate([PROMPTS[0]], sampled(kind, seed=None)) for llm in engines.values()]
    assert len({tuple(output.outputs[0].token_ids) for (output,) in unseeded}) == len(engines)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_where_no_token_is_allowed(engines: dict[int, LLM], params: dict[str, Any]) -> None:
    """The last rank alone may offer, then nobody: the request ends, those beside it go on."""
    last = engines[1].source.config.vocab_size - 1
    stuck = SamplingParams(**params, allowed_token_ids=[last], bad_words=[[last, last]], max_tokens=5, logprobs=1)
    fine = params_of("all")
    (wanted,) = engines[1].generate([PROMPTS[1]], fine)
    for llm in engines.values():
        first, second = llm.generate(PROMPTS[:2], [stuck, fine])
        assert (first.outputs[0].token_ids, first.outputs[0].finish_reason) == ([last], "abort")
        assert second.outputs[0].token_ids == wanted.outputs[0].token_ids


def test_many_candidates_for_min_p(engines: dict[int, LLM]) -> None:
    """A flat distribution: all tokens are candidates, more than a rank offers at first."""
    params = params_of("temperature", temperature=50.0, min_p=0.5)
    for llm in engines.values():
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
            logits = assert_plain(engines[WHOLE], prompt, output.outputs[0], params)
            assert np.ptp(logits) / 50 < np.log(2), "not everything is a candidate: the test tests nothing"
