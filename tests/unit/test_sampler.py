"""The sampler against straightforward ones, its distribution, and the random numbers under it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_sampler import candidates, chosen

from serried.backends.philox import gumbel_noise, philox4x32, sample_seed
from serried.backends.picks import NO_TOKEN
from serried.backends.survey import LEAF, NumpyChoices, best
from serried.engine.choice import MORE, make_offers
from serried.engine.edits import Edits
from serried.engine.request import Request
from serried.engine.sampler import decide, pack_offers, unpack_offers
from serried.engine.wants import Want, pack_wants, unpack_wants
from serried.sampling_params import SamplingParams

# Few different values, so that ties are common.
logit_lists = st.lists(st.sampled_from([-3.0, -0.5, 0.0, 0.25, 1.0, 2.0, 7.5]), min_size=1, max_size=40)


def request(seed: int = 0, length: int = 5, **params: Any) -> Request:
    return Request(0, [1] * length, SamplingParams(**params), seed)


def logits_of(values: Any) -> Any:
    return np.array(values, np.float32)


def sample(logits: Any, asked: Request, edges: tuple[int, ...] = ()) -> int:
    """The token, from the offers of ranks that hold the logits between some edges."""
    (want,) = unpack_wants(pack_wants([Want.of(asked)]))
    bounds = [0, *edges, logits.size]
    if want.edits:
        logits = logits.copy()
        Edits.unpack(want.edits).apply(logits, 0)
    for power in range(9):
        offers = [
            make_offers(NumpyChoices(), logits[None, a:b], a, [0], [want], MORE**power) for a, b in pairwise(bounds)
        ]
        travelled = [unpack_offers(pack_offers(own), 1)[0] for own in offers]
        token = decide(want, travelled)
        if token is not None:
            return token
    raise AssertionError("never enough candidates")


# Known answers of the Random123 paper's distribution (kat_vectors): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, 0xFFFFFFFF_FFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0_A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(counter: tuple[int, int, int, int], key: int, words: tuple[int, ...]) -> None:
    first, *rest = counter
    got = philox4x32(key, (np.array([first, 1, first], np.uint64), rest[0], rest[1], rest[2]))
    assert got.dtype == np.uint32
    assert tuple(got[0].tolist()) == tuple(got[2].tolist()) == words
    assert tuple(got[1].tolist()) != words


@given(st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 20), st.lists(st.integers(0, 200_000), min_size=1))
def test_noise_depends_on_nothing_but_the_token(seed: int, position: int, ids: list[int]) -> None:
    """Any subset, in any order: each token's noise is its own."""
    together = gumbel_noise(seed, position, np.array(ids))
    alone = [gumbel_noise(seed, position, np.array([i]))[0] for i in ids]
    assert together.tolist() == alone
    assert np.isfinite(together).all()


def test_noise_is_gumbels() -> None:
    noise = gumbel_noise(3, 0, np.arange(100_000))
    assert abs(noise.mean() - np.euler_gamma) < 0.02
    assert abs(noise.var() - math.pi**2 / 6) < 0.05
    for other in (gumbel_noise(4, 0, np.arange(1000)), gumbel_noise(3, 1, np.arange(1000))):
        assert abs(np.corrcoef(noise[:1000], other)[0, 1]) < 0.1


@given(logit_lists)
def test_greedy_takes_the_lowest_of_the_best(values: list[float]) -> None:
    assert sample(logits_of(values), request(temperature=0)) == values.index(max(values))
    assert sample(logits_of(values), request(temperature=0, top_k=3, top_p=0.5)) == values.index(max(values))
    assert sample(logits_of(values), request(temperature=0.7, top_k=1)) == values.index(max(values))
    assert sample(logits_of(values), request(temperature=0.7, top_p=1e-9)) == values.index(max(values))


@settings(max_examples=300)
@given(
    logit_lists,
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([-1, 0, 1, 2, 5, 39, 40, 9999999]),
    st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 1e-300, 0.02, 0.3, 1.0]),
    st.integers(0, (1 << 64) - 1),
)
def test_top_k_top_p_and_min_p(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    asked = request(seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert sample(logits_of(values), asked) == chosen(values, asked.params, seed, 5)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"min_p": 0.3}, [1, 3, 0]),  # e^-1 is above 0.3, e^-1.5 is not
        ({"min_p": 1.0}, [1]),
        ({"min_p": 0.2, "top_k": 2}, [1, 3]),
        ({"min_p": 0.2, "top_p": 0.55}, [1, 3]),  # of what min_p has left, not of the whole
        ({"top_k": 3, "top_p": 0.6}, [1, 3]),  # of what top_k has left
        ({"temperature": 2.0, "min_p": 0.3}, [1, 3, 0, 2]),
    ],
)
def test_who_is_left(params: dict[str, Any], kept: list[int]) -> None:
    """Worked out by hand, and by drawing until everyone has come."""
    values = [1.0, 2.0, 0.5, 1.75, -3.0]
    asked = {"temperature": 1.0, **params}
    assert candidates(values, SamplingParams(**asked)) == kept
    assert {sample(logits_of(values), request(seed, **asked)) for seed in range(200)} == set(kept)


@given(logit_lists, st.integers(1, 50))
def test_the_best(values: list[float], count: int) -> None:
    wanted = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert best(np.array(values), count).tolist() == wanted


@settings(max_examples=150)
@given(
    st.integers(1, 1500),
    st.sampled_from([0.02, 1.0, 3.0]),
    st.sampled_from([0, 1, 7, 64, 700, 9999999]),
    st.sampled_from([0.01, 0.7, 0.97, 0.9999, 1.0]),
    st.sampled_from([0.0, 0.0, 1e-9, 0.01, 0.5]),
    st.integers(0, (1 << 64) - 1),
    st.data(),
)
def test_the_split_does_not_matter(
    size: int, spread: float, top_k: int, top_p: float, min_p: float, seed: int, data: st.DataObject
) -> None:
    """Between any leaves, with ranks that hold nothing; where the first candidates are and are not enough.

    Some ids are forbidden, single ones or whole leaves; where all are, no token comes out.
    """
    decimals = data.draw(st.sampled_from([1, 9]))  # with and without many ties
    logits = logits_of((np.random.default_rng(seed).normal(size=size) * spread).round(decimals))
    leaves = -(-size // LEAF)
    edges = tuple(min(size, LEAF * edge) for edge in sorted(data.draw(st.lists(st.integers(0, leaves), max_size=3))))
    start = data.draw(st.integers(0, size))
    logits[start : data.draw(st.integers(start, size))] = -np.inf
    for params in ({"top_k": top_k, "top_p": top_p, "min_p": min_p}, {}, {"temperature": 0}):
        asked = request(seed, **{"temperature": 1.0, **params})
        wanted = chosen(logits.astype(float).tolist(), asked.params, seed, 5)
        assert sample(logits, asked) == sample(logits, asked, edges) == (NO_TOKEN if wanted is None else wanted)


@given(
    st.lists(
        st.builds(
            Want,
            temperature=st.floats(0, 1e300),
            top_p=st.floats(1e-12, 1.0),
            min_p=st.floats(0, 1.0),
            seed=st.integers(0, (1 << 64) - 1),
            top_k=st.integers(0, (1 << 31) - 1),
            position=st.integers(0, (1 << 31) - 1),
            logprobs=st.integers(-1, 1000),
            target=st.integers(-1, (1 << 31) - 1),
            edits=st.binary(max_size=12).map(lambda data: data * 4),
        )
    )
)
def test_what_is_wanted_travels(wants: list[Want]) -> None:
    assert unpack_wants(np.frombuffer(pack_wants(wants).tobytes(), np.int32)) == wants
    assert pack_wants(wants).dtype == np.int32


@pytest.mark.parametrize("kind", ["temperature", "top_p", "min_p", "greedy"])
def test_edits_come_before_the_choice(kind: str) -> None:
    """The likeliest tokens are taken away or pushed down; what comes out is never one of them."""
    asked = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.0} if kind == "top_p" else {"temperature": 1.0}
    asked |= {"min_p": 0.1} if kind == "min_p" else {}
    asked |= {"temperature": 0} if kind == "greedy" else {}
    values = logits_of([9.0, 8.0, 7.0, 6.0, 5.0, -50.0])
    for edits, wanted in (
        ({"allowed_token_ids": [2, 4]}, {2, 4}),
        ({"logit_bias": {0: -100, 1: -100, 2: -100, 5: 55}}, {3, 4, 5}),
        ({"logit_bias": {3: 100}}, {3}),
    ):
        tokens = {sample(values, request(seed, **asked, **edits)) for seed in range(60)}
        assert tokens <= wanted
        assert len(tokens) == 1 or kind != "greedy"


def test_the_answers_of_one_seed_differ() -> None:
    """sample_seed: the first is the seed's own, the others are seeds of their own."""
    seeds = [sample_seed(seed, sample) for seed in (0, 1, (1 << 64) - 1) for sample in range(100)]
    assert len(set(seeds)) == 300
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert seeds[::100] == [0, 1, (1 << 64) - 1]
    bits = philox4x32(0, (np.zeros(1, np.uint64), 0, 1, 1))[0]
    assert seeds[1] == int(bits[0]) + (int(bits[1]) << 32)
    assert seeds[1] != sample_seed(0, 2) != sample_seed(1, 1)


@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}, {"temperature": 2.0}])
def test_the_distribution(by: str, params: dict[str, Any]) -> None:
    """Chi-square of 2000 draws: over seeds at one position, and over the positions of one seeded request."""
    asked = {"temperature": 1.0, **params}
    values = [0.1, 1.5, -1.0, 0.9, 1.5, -4.0, 0.0]
    kept = candidates(values, SamplingParams(**asked))
    weights = np.array([math.exp(values[i] / asked["temperature"]) if i in kept else 0 for i in range(len(values))])
    draws = 2000
    expected = weights / weights.sum() * draws
    seen = np.zeros(len(values))
    for n in range(draws):
        where = {"seed": n} if by == "seed" else {"seed": 99, "length": n + 1}
        seen[sample(logits_of(values), request(**where, **asked))] += 1
    assert not seen[expected == 0].any()
    inside = expected > 0
    chi_square = (np.square(seen - expected)[inside] / expected[inside]).sum()
    critical = {2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5}  # one in a thousand, by degrees of freedom
    assert chi_square < critical[int(inside.sum()) - 1]


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-300, 5e-324])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_tiny_temperature_is_greedy(temperature: float, top_p: float) -> None:
    values = logits_of([3.0, 12.5, -7.0, 12.75, 0.0])
    assert sample(values, request(temperature=temperature, top_p=top_p)) == 3


def test_a_mixed_batch_does_not_matter() -> None:
    """Sampling one request leaves nothing behind that another could see."""
    values = logits_of(np.random.default_rng(0).normal(size=500))
    first = sample(values, request(7, temperature=1.0, top_k=64))
    sample(values, request(8, temperature=0.5, top_k=0))
    assert sample(values, request(7, temperature=1.0, top_k=64)) == first


def test_a_request_ends() -> None:
    """At an end token unless it is ignored, at a stop token always, at its length."""
    for params, output, reason in (
        ({}, [2], "stop"),
        ({"ignore_eos": True}, [2, 9, 9], "length"),
        ({"ignore_eos": True, "stop_token_ids": [2]}, [2], "stop"),
        ({"stop_token_ids": [9]}, [5, 9], "stop"),
        ({}, [5, 5, 2], "stop"),
    ):
        made = Request(0, [1], SamplingParams(max_tokens=3, **params), 0, frozenset({2}))
        for token in output:
            assert made.finish_reason is None
            made.append(token)
        assert made.finish_reason == reason
