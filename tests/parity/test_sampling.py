"""Sampling against transformers: its logits processors one by one, and its greedy generation with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from plain_sampler import log_softmax
from tiny_models import Models

from serried import LLM, SamplingParams, _native
from serried.backends.survey import survey_row
from serried.engine.edits import LogitEditor
from serried.engine.request import Request
from serried.engine.sampler import _kept, make_offer
from serried.engine.wants import Want

VOCAB = 2000
PROMPT = [5, 9, 1700, 44, 5, 9, 3]
OUTPUT = [12, 5, 12, 1999, 0, 12]


def logits(seed: int, spread: float = 3.0) -> Any:
    return (np.random.default_rng(seed).normal(size=VOCAB) * spread).astype(np.float32)


def processed(processor: Any, row: Any, ids: list[int]) -> Any:
    return processor(torch.tensor([ids]), torch.from_numpy(row[None].copy()))[0].numpy()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({"top_k": 17}, [transformers.TopKLogitsWarper(17)]),
        ({"top_p": 0.83}, [transformers.TopPLogitsWarper(0.83)]),
        ({"min_p": 0.07}, [transformers.MinPLogitsWarper(0.07)]),
        ({"top_k": 300, "top_p": 0.6}, [transformers.TopKLogitsWarper(300), transformers.TopPLogitsWarper(0.6)]),
        ({"top_k": 12, "min_p": 0.3}, [transformers.TopKLogitsWarper(12), transformers.MinPLogitsWarper(0.3)]),
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_who_is_left(params: dict[str, Any], warpers: list[Any], temperature: float, spread: float, seed: int) -> None:
    row = logits(seed, spread)
    wanted = processed(transformers.TemperatureLogitsWarper(temperature), row, PROMPT)
    for warper in warpers:
        wanted = processed(warper, wanted, PROMPT)
    want = Want.of(Request(0, PROMPT, SamplingParams(temperature=temperature, **params), 0))
    survey = survey_row(row, VOCAB if want.open_ended else want.candidates, want.divisor, want.needs_sum)
    offer = make_offer(row, 0, want, survey)
    kept = _kept(offer.scores, want, [offer])
    assert set(offer.ids[:kept].tolist()) == set(np.flatnonzero(wanted > -np.inf).tolist())


@pytest.mark.parametrize(
    ("params", "processor"),
    [
        ({"repetition_penalty": 1.3}, transformers.RepetitionPenaltyLogitsProcessor(1.3)),
        ({"repetition_penalty": 0.8}, transformers.RepetitionPenaltyLogitsProcessor(0.8)),
        ({"logit_bias": {5: -3.25, 700: 8.1}}, transformers.SequenceBiasLogitsProcessor({(5,): -3.25, (700,): 8.1})),
        ({"min_tokens": 9}, transformers.MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, [7, 11], "cpu")),
        ({"min_tokens": 6}, transformers.MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, [7, 11], "cpu")),
        (
            {"allowed_token_ids": [3, 64, 1998]},
            transformers.SuppressTokensLogitsProcessor([i for i in range(VOCAB) if i not in {3, 64, 1998}]),
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_each_edit(params: dict[str, Any], processor: Any) -> None:
    """The same bits, in float32."""
    row = logits(1)
    wanted = processed(processor, row, PROMPT + OUTPUT)
    LogitEditor(SamplingParams(**params), [7, 11], ()).edits(PROMPT, OUTPUT).apply(row, 0)
    assert np.array_equal(row, wanted)


def test_bad_words() -> None:
    words = [[8], [12, 40], [0, 12, 50], [12, 12, 60], [5, 12, 1999, 0, 12, 70], [13, 80]]
    row = logits(2)
    wanted = processed(transformers.NoBadWordsLogitsProcessor(words, eos_token_id=7), row, OUTPUT)
    LogitEditor(SamplingParams(), (), words).edits([], OUTPUT).apply(row, 0)
    assert np.array_equal(row, wanted)
    assert np.flatnonzero(row == -np.inf).tolist() == [8, 40, 50, 70]


GENERATE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "repeated": ({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
    "bias": ({"logit_bias": {7: 2.5, 30: -1.0}}, {"sequence_bias": [[[7], 2.5], [[30], -1.0]]}),
    "min tokens": ({"min_tokens": 12, "logit_bias": {2: 99}}, {"min_new_tokens": 12, "sequence_bias": [[[2], 99.0]]}),
    "bad words": ({"bad_words": [[i] for i in range(50, 150)]}, {"bad_words_ids": [[i] for i in range(50, 150)]}),
    "several": (
        {"repetition_penalty": 1.2, "bad_words": [[60], [61]], "min_tokens": 3},
        {"repetition_penalty": 1.2, "bad_words_ids": [[60], [61]], "min_new_tokens": 3},
    ),
}


def open_llm(path: Path, backend: str) -> LLM:
    return LLM(str(path), dtype="float32", backend=backend, threads_per_rank=1, max_num_batched_tokens=13)


@pytest.fixture(scope="module", params=["torch", "native"])
def llm(request: pytest.FixtureRequest, tiny: Models) -> Any:
    if request.param == "native" and not _native.available():
        pytest.skip("Serried was installed without its extension")
    with open_llm(tiny.directory("llama-tied"), request.param) as made:
        yield made


@pytest.mark.parametrize("kind", GENERATE)
def test_greedy_generation(tiny: Models, llm: LLM, kind: str) -> None:
    ours, theirs = GENERATE[kind]
    prompt = [int(i) for i in np.random.default_rng(4).integers(3, 300, 30)]
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16, **ours))
    ids = torch.tensor([prompt])
    found = tiny.model("llama-tied").generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16, eos_token_id=2, pad_token_id=2,
        renormalize_logits=False, **theirs,
    )  # fmt: skip
    assert output.outputs[0].token_ids == found[0, len(prompt) :].tolist()


def test_logprobs(tiny: Models, llm: LLM) -> None:
    """Of prompt and answer, against the log-softmax of transformers' logits."""
    prompt = [int(i) for i in np.random.default_rng(5).integers(3, 300, 30)]
    asked = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True, logprobs=4, prompt_logprobs=4)
    (output,) = llm.generate([prompt], asked)
    answer = output.outputs[0]
    whole = [*prompt, *answer.token_ids]
    with torch.inference_mode():
        table = log_softmax(tiny.model("llama-tied")(torch.tensor([whole])).logits[0].numpy())
    assert output.prompt_logprobs is not None
    assert answer.logprobs is not None
    entries = [*output.prompt_logprobs[1:], *answer.logprobs]
    assert len(entries) == len(whole) - 1
    for token, each, wanted in zip(whole[1:], entries, table, strict=False):
        assert each is not None
        assert list(each) == [token, *(i for i in np.argsort(-wanted)[:4].tolist() if i != token)]
        assert all(abs(one.logprob - wanted[i]) < 1e-4 for i, one in each.items())
