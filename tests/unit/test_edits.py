"""Edits of logits against their definitions, over any split, and step by step as an output grows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_sampler import edited

from serried.engine.edits import Edits, LogitEditor, bitmask, nothing_left
from serried.engine.request import Request
from serried.sampling_params import SamplingParams

VOCAB = 70
ids = st.integers(0, VOCAB - 1)
# Powers of two and few values: float32 and float64 give the same, ties and all.
halves = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0])
params = st.builds(
    SamplingParams,
    presence_penalty=halves,
    frequency_penalty=halves,
    repetition_penalty=st.sampled_from([0.25, 1.0, 2.0]),
    logit_bias=st.none() | st.dictionaries(ids, st.sampled_from([-100, -0.5, 3.0])),
    allowed_token_ids=st.none() | st.lists(ids, min_size=1),
    stop_token_ids=st.lists(ids, max_size=2),
    min_tokens=st.integers(0, 5),
)
words = st.lists(st.lists(ids, min_size=1, max_size=3), max_size=5)


def logits_of(seed: int) -> Any:
    return np.random.default_rng(seed).integers(-8, 9, VOCAB).astype(np.float32) / 4


def applied(edits: Edits, row: Any, edges: tuple[int, ...] = ()) -> Any:
    """A row as ranks edit it that hold it between some edges, each from what has travelled to it."""
    row = row.copy()
    for start, stop in pairwise([0, *edges, len(row)]):
        Edits.unpack(edits.pack()).apply(row[start:stop], start)
    return row


@settings(max_examples=200)
@given(params, words, st.lists(ids, max_size=9), st.lists(ids, max_size=9), st.integers(0, 99), st.data())
def test_edits_are_their_definitions(
    asked: SamplingParams, bad: list[list[int]], prompt: list[int], output: list[int], seed: int, data: st.DataObject
) -> None:
    """At every length of an output that grows, between any edges, ranks without a row among them."""
    ends = (7, 30)
    editor = LogitEditor(asked, (*asked.stop_token_ids, *ends), bad)
    row = logits_of(seed)
    edges = tuple(sorted(data.draw(st.lists(st.integers(0, VOCAB), max_size=3))))
    for length in range(len(output) + 1):
        said = output[:length]
        wanted = np.array(edited(row, prompt, said, asked, ends, bad), np.float32)
        edits = editor.edits(prompt, said)
        for split in ((), edges):
            assert np.array_equal(applied(edits, row, split), wanted)


def test_edits_are_made_from_any_point_on() -> None:
    """An output that is there already, as after a restart, counts as one that came token by token."""
    asked = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.5)
    grown = LogitEditor(asked, (), ())
    for length in range(200):
        found = grown.edits([1, 2, 2], [i % 90 for i in range(length)])
    at_once = LogitEditor(asked, (), ()).edits([1, 2, 2], [i % 90 for i in range(199)])
    assert found.pack() == at_once.pack()
    assert found.seen.size == 90
    assert found.offsets[found.seen.tolist().index(3)] == -(1 + 0.5 * 3)


def test_penalties_are_counted_once() -> None:
    """Tokens of the prompt are repeated, but neither present nor frequent."""
    asked = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    row = np.array([4.0, -4.0, 4.0, -4.0, 4.0], np.float32)
    edits = LogitEditor(asked, (), ()).edits([0, 1, 0], [2, 3, 3])
    assert applied(edits, row).tolist() == [2.0, -8.0, 2 - 0.75, -8 - 1.0, 4.0]


def test_without_penalties_nothing_is_counted() -> None:
    edits = LogitEditor(SamplingParams(min_tokens=3), [5], ()).edits([1, 2], [3])
    assert (edits.banned.tolist(), edits.seen.size, edits.allowed.size) == ([5], 0, 0)


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e40, 1e308])
def test_extreme_penalties_stay_finite(penalty: float) -> None:
    row = np.array([30.0, -30.0, 0.0, 1e-30, -np.inf], np.float32)
    edits = LogitEditor(SamplingParams(repetition_penalty=penalty), (), ()).edits([0, 1, 2, 3, 4], [])
    found = applied(edits, row)
    assert np.isfinite(found[:4]).all()
    assert (found[2], found[4]) == (0, -np.inf)


@given(st.lists(st.integers(0, 300), min_size=1))
def test_a_bitmask(allowed: list[int]) -> None:
    mask = bitmask(allowed)
    assert mask.size == max(allowed) // 32 + 1
    assert {i for i in range(32 * mask.size) if int(mask[i // 32]) >> i % 32 & 1} == set(allowed)


def test_a_bad_word_is_banned_where_it_would_be_complete() -> None:
    """By the output alone: what the prompt ends with does not count."""
    editor = LogitEditor(SamplingParams(), (), [[4], [1, 2], [1, 1, 3]])
    for output, banned in (([], {4}), ([1], {4, 2}), ([1, 1], {4, 2, 3}), ([1, 1, 5], {4}), ([5, 1, 1], {4, 2, 3})):
        assert set(editor.edits([1, 1], output).banned.tolist()) == banned


def test_a_request_that_edits_nothing_has_no_editor() -> None:
    assert Request(0, [1], SamplingParams(temperature=0.5, top_k=3, min_p=0.1, logprobs=2), 0).editor is None
    for asked in ({"min_tokens": 1}, {"logit_bias": {3: 1.0}}, {"allowed_token_ids": [3]}, {"presence_penalty": 0.1}):
        assert Request(0, [1], SamplingParams(**asked), 0).editor is not None
    assert Request(0, [1], SamplingParams(), 0, bad_words=[[3]]).editor is not None


@pytest.mark.parametrize(
    ("asked", "bad", "nothing"),
    [
        ({"allowed_token_ids": [3, 4]}, [[3]], False),
        ({"allowed_token_ids": [3, 4]}, [[3], [4]], True),
        ({"allowed_token_ids": [3, 4]}, [[3], [4, 4]], False),
        ({"allowed_token_ids": [1], "min_tokens": 1}, [], True),
        ({"allowed_token_ids": [1]}, [], False),
        ({}, [[i] for i in range(5)], True),
        ({"min_tokens": 2}, [[0], [2], [3], [4]], True),
        ({"min_tokens": 2}, [[0], [2], [3]], False),
    ],
)
def test_when_nothing_is_left(asked: dict[str, Any], bad: list[list[int]], nothing: bool) -> None:
    assert nothing_left(SamplingParams(**asked), [1], bad, 5) == nothing
