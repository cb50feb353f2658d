"""From scheduled requests to the flat arrays of a step, and the one array in which they travel."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serried.backends.picks import unpack_picks
from serried.backends.step import StepInput
from serried.engine.batch import build_step
from serried.engine.request import Request
from serried.engine.scheduler import Scheduled
from serried.engine.wants import Want, unpack_wants
from serried.sampling_params import SamplingParams

arrays = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=9).map(lambda x: np.array(x, np.int32))


@given(st.tuples(*[arrays] * len(fields(StepInput))))
def test_what_is_packed_comes_out_again(contents: Any) -> None:
    flat = StepInput(*contents).flat
    assert flat.dtype == np.int32
    again = StepInput.unpack(np.frombuffer(flat.tobytes(), np.int32))
    for field, wanted in zip(fields(StepInput), contents, strict=True):
        got = getattr(again, field.name)
        assert got.dtype == np.int32
        assert np.array_equal(got, wanted)


def test_a_step_of_three_requests() -> None:
    """A chunk in the middle of a prompt, a decode, and a prompt's last chunk."""
    params = SamplingParams(max_tokens=9)
    middle = Request(0, list(range(100, 120)), params, 6, blocks=[5, 2, 9, 0, 7, 1, 3])
    decode = Request(1, [50, 51, 52], params, 7, output=[60, 61], computed=4, blocks=[4, 8, 6])
    last = Request(2, [70, 71, 72, 73, 74], params, 8, computed=3, blocks=[11, 10])
    step = build_step([Scheduled(middle, 6, 10), Scheduled(decode, 4, 5), Scheduled(last, 3, 5)], 4)
    assert step.tokens.tolist() == [106, 107, 108, 109, 61, 73, 74]
    assert step.positions.tolist() == [6, 7, 8, 9, 4, 3, 4]
    assert step.slots.tolist() == [10, 11, 36, 37, 32, 47, 40]
    assert step.row_starts.tolist() == [0, 4, 5, 7]
    assert step.kv_lens.tolist() == [10, 5, 5]
    assert step.block_starts.tolist() == [0, 3, 5, 7]
    assert step.blocks.tolist() == [5, 2, 9, 4, 8, 11, 10]
    assert step.logit_rows.tolist() == [4, 6]
    assert step.requests == 3
    assert step.sampling.size == 0
    assert [part.tolist() for part in unpack_picks(step.picks)] == [[1.0, 1.0], [7, 8], [5, 5]]
    every = build_step([Scheduled(middle, 6, 10), Scheduled(last, 3, 5)], 4, whole_logits=True)
    assert every.logit_rows.tolist() == list(range(6))
    assert every.sampling.size == every.picks.size == 0
    assert all(getattr(step, field.name).dtype == np.int32 for field in fields(StepInput))


def test_who_wants_more_than_a_pick() -> None:
    """One row with top_p, edits or log-probabilities, and all rows go by their wants."""
    plain = Request(0, [50, 51], SamplingParams(), 3, blocks=[4])
    for params in ({"top_p": 0.5}, {"logit_bias": {5: 1.0}}, {"logprobs": 0}, {"top_k": 2}):
        other = Request(1, [52], SamplingParams(**params), 4, blocks=[2])  # type: ignore[arg-type]
        step = build_step([Scheduled(plain, 0, 2), Scheduled(other, 0, 1)], 4)
        assert step.picks.size == 0
        assert unpack_wants(step.sampling) == [Want.of(plain), Want.of(other)]


def test_a_prompt_that_is_scored() -> None:
    """Rows want logits for the next token of the prompt, in chunks each once; the last row gives the first answer."""
    asked = SamplingParams(max_tokens=9, prompt_logprobs=2, logprobs=0)
    scored = Request(0, [70, 71, 72, 73, 74], asked, 0, blocks=[11, 10])
    other = Request(1, [50, 51], asked, 0, sample=1, blocks=[4])
    first = build_step([Scheduled(other, 0, 2), Scheduled(scored, 0, 3)], 4)
    assert first.logit_rows.tolist() == [1, 2, 3, 4]
    wants = unpack_wants(first.sampling)
    assert [(want.target, want.logprobs) for want in wants] == [(-1, 0), (71, 2), (72, 2), (73, 2)]
    assert [want.samples for want in wants] == [True, False, False, False]
    scored.prompt_logprobs += [None, None, None]  # type: ignore[list-item]
    again = build_step([Scheduled(scored, 0, 5)], 4)
    assert again.logit_rows.tolist() == [3, 4]
    assert [want.target for want in unpack_wants(again.sampling)] == [74, -1]
    alone = Request(2, [50], asked, 0, blocks=[4])
    assert build_step([Scheduled(alone, 0, 1)], 4).logit_rows.tolist() == [0]


@given(st.integers(1, 9), st.integers(0, 9), st.data())
def test_a_requests_tokens(prompt: int, output: int, data: st.DataObject) -> None:
    whole = list(range(prompt + output))
    request = Request(0, whole[:prompt], SamplingParams(), 0, output=whole[prompt:])
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert request.tokens(start, stop) == whole[start:stop]
