"""Log-probabilities from all ranks' parts of the vocabulary, against a log-softmax of the whole."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_sampler import log_softmax

from serried.backends.picks import NO_TOKEN
from serried.backends.survey import LEAF, NumpyChoices
from serried.engine.interface import TokenLogprobs
from serried.engine.logprobs import score_tokens
from serried.engine.wants import Want
from serried.parallel.comm import Counters, LocalComm


class Threads:
    """A group whose ranks are threads of this process, seen from one of them."""

    def __init__(self, rank: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(table)
        self.counters = Counters()
        self._table, self._barrier = table, barrier

    def _meet(self, x: Any) -> list[Any]:
        self._table[self.rank] = x
        self._barrier.wait(10)
        found = list(self._table)
        self._barrier.wait(10)
        return found

    def all_gather(self, x: Any, parts: Any, dim: int = 0) -> Any:
        return np.concatenate(self._meet(x))

    def gather(self, x: Any, parts: Any, dim: int = 0, root: int = 0) -> Any:
        whole = np.concatenate(self._meet(x))
        return whole if self.rank == root else None

    def broadcast(self, x: Any, root: int = 0) -> Any:
        return self._meet(x)[root]


def scores(logits: Any, wants: list[Want], tokens: list[int], edges: list[int]) -> list[TokenLogprobs]:
    """What rank 0 has, where ranks hold the vocabulary between some edges; the others have nothing."""
    bounds = [0, *edges, logits.shape[1]]
    table: list[Any] = [None] * (len(bounds) - 1)
    barrier = threading.Barrier(len(table))

    def work(rank: int) -> list[TokenLogprobs] | None:
        comm: Any = Threads(rank, table, barrier)
        own = np.ascontiguousarray(logits[:, bounds[rank] : bounds[rank + 1]])
        return score_tokens(NumpyChoices(), own, bounds[rank], wants, tokens if rank == 0 else None, comm)

    with ThreadPoolExecutor(len(table)) as pool:
        found, *others = pool.map(work, range(len(table)))
    assert found is not None
    assert others == [None] * len(others)
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(0, 99), st.lists(st.integers(0, 30), min_size=1, max_size=4), st.data())
def test_scores_are_a_log_softmax(size: int, seed: int, counts: list[int], data: st.DataObject) -> None:
    """Any number of rows, each with its own number of likeliest tokens; the same bits for every split."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(len(counts), size)).astype(np.float32).round(data.draw(st.sampled_from([1, 6]))) * 3
    tokens = [int(token) for token in rng.integers(0, size, len(counts))]
    wants = [
        Want(logprobs=count, target=token if i % 2 else -1)
        for i, (count, token) in enumerate(zip(counts, tokens, strict=True))
    ]
    chosen = [token for want, token in zip(wants, tokens, strict=True) if want.samples]
    found = scores(logits, wants, chosen, [])
    leaves = data.draw(st.lists(st.integers(0, -(-size // LEAF)), max_size=3))
    assert scores(logits, wants, chosen, sorted(min(size, LEAF * leaf) for leaf in leaves)) == found
    for row, token, count, score in zip(logits, tokens, counts, found, strict=True):
        wanted = log_softmax(row)
        order = sorted(range(size), key=lambda i: (-row[i], i))[:count]
        assert score.ids == (token, *(i for i in order if i != token))
        assert score.ranks == tuple(1 + int((row > row[i]).sum()) for i in score.ids)
        assert np.allclose(score.logprobs, wanted[list(score.ids)], rtol=0, atol=1e-12)


def test_rows_that_want_nothing_are_left_out() -> None:
    logits = np.random.default_rng(0).normal(size=(4, 100)).astype(np.float32)
    wants = [Want(), Want(logprobs=1, target=7), Want(logprobs=0), Want()]
    found = scores(logits, wants, [1, 2, 3], [])
    assert [score.ids[0] for score in found] == [7, 2]
    assert scores(logits, [Want()] * 4, [1, 2, 3, 4], []) == []
    assert score_tokens(NumpyChoices(), logits, 0, [Want()] * 4, None, LocalComm()) is None


def test_extremes() -> None:
    """Logits that are far apart, or -inf as a family may mask them, and a row for which no token was chosen."""
    row = np.full((1, 130), -np.inf, np.float32)
    row[0, [3, 129]] = 3e38, -3e38
    (found,) = scores(row, [Want(logprobs=3)], [3], [64])
    assert (found.ids, found.ranks) == ((3, 129), (1, 2))  # what cannot come is not among the likeliest
    assert found.logprobs == (0, pytest.approx(-6e38, rel=1e-6))
    assert len(scores(row, [Want(logprobs=1)], [NO_TOKEN], [])) == 1
