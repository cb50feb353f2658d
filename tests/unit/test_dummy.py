"""Dummy weights: every slice is that of the whole, and the recipe holds to the bit."""

from __future__ import annotations

import hashlib
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serried.errors import CheckpointError
from serried.parallel.reduction import Span
from serried.weights import dummy
from serried.weights.dummy import DummyCheckpoint


def whole(name: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    return DummyCheckpoint({name: shape}, seed).read(name, Span(0, shape[0]))


def by_the_recipe(seed: int, name: str, index: int) -> float:
    """One element, from the text of the recipe, in Python's integers."""

    def mix(x: int, key: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & 0xFFFFFFFF
        x ^= key
        x ^= x >> 15
        x = x * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    k0, k1 = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
    high, low = divmod(index // 4, 1 << 32)
    word = mix((low + k0) & 0xFFFFFFFF, k1 ^ mix(high, 0))
    u = word >> 8 * (index % 4) & 0xFF
    return 1 + ((u >> 4) - 8) / 128 if "norm" in name else (2 * u - 255) / 8192


@settings(max_examples=150, deadline=None)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    piece=st.sampled_from([1, 2, 7, 64]),
    data=st.data(),
)
def test_every_slice_is_that_of_the_whole(shape: tuple[int, ...], piece: int, data: Any) -> None:
    full = whole("w", shape)
    assert full.shape == shape and full.dtype == ml_dtypes.bfloat16
    rows = Span(*sorted(data.draw(st.tuples(*[st.integers(0, shape[0])] * 2))))
    columns = None
    if len(shape) == 2 and data.draw(st.booleans()):
        columns = Span(*sorted(data.draw(st.tuples(*[st.integers(0, shape[1])] * 2))))
    expected = full[slice(*rows)] if columns is None else full[slice(*rows), slice(*columns)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dummy, "PIECE", piece)
        values = DummyCheckpoint({"w": shape}, 0).read("w", rows, columns)
    assert values.shape == expected.shape and (values == expected).all()


def test_slices_of_several_pieces() -> None:
    shape = (300, 1001)
    full = whole("w", shape, seed=7)
    checkpoint = DummyCheckpoint({"w": shape}, 7)
    assert (checkpoint.read("w", Span(10, 299)) == full[10:299]).all()
    assert (checkpoint.read("w", Span(1, 300), Span(3, 998)) == full[1:, 3:998]).all()
    long = whole("v", (2, 3 * dummy.PIECE * 4 + 5))
    part = DummyCheckpoint({"v": long.shape}, 0).read("v", Span(1, 2), Span(1, long.shape[1] - 1))
    assert (part == long[1:, 1:-1]).all()


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_values_follow_the_recipe(name: str) -> None:
    values = whole(name, (100,) if "norm" in name else (20, 5), seed=3).reshape(-1)
    assert values.tolist() == [by_the_recipe(3, name, i) for i in range(100)]


@pytest.mark.parametrize("width", [1 << 15, (1 << 15) + 3])
def test_word_indices_above_32_bits(width: int) -> None:
    """Rows on both sides of the 2^34th element, where the index of a word outgrows 32 bits."""
    checkpoint = DummyCheckpoint({"w": (1 << 20, width)}, 1)
    edge = (1 << 34) // width
    rows, columns = Span(edge - 2, edge + 3), Span(5, 12)
    values = checkpoint.read("w", rows, columns)
    expected = [[by_the_recipe(1, "w", r * width + c) for c in range(5, 12)] for r in range(*rows)]
    assert values.tolist() == expected
    across = checkpoint.read("w", rows)
    assert (across[:, 5:12] == values).all()
    assert across[2].tolist()[:9] == [by_the_recipe(1, "w", (edge) * width + c) for c in range(9)]
    assert across[1].tolist()[-9:] == [by_the_recipe(1, "w", edge * width - 9 + c) for c in range(9)]
    far = checkpoint.read("w", Span((1 << 20) - 1, 1 << 20), Span(0, 4)).tolist()[0]
    assert far == [by_the_recipe(1, "w", ((1 << 20) - 1) * width + c) for c in range(4)]
    low = checkpoint.read("w", Span(0, 1), Span(0, 4)).tolist()[0]
    assert low != checkpoint.read("w", Span(edge, edge + 1), Span(0, 4)).tolist()[0]


def test_golden_values() -> None:
    """Written out, in units of 2^-13 and 2^-7: a C++ twin must make the same."""
    w = whole("model.layers.0.mlp.down_proj.weight", (3, 4), seed=0).astype(np.float64) * 2**13
    assert w.astype(int).tolist() == GOLDEN_LINEAR
    norm = whole("model.norm.weight", (12,), seed=42).astype(np.float64) * 2**7
    assert norm.astype(int).tolist() == GOLDEN_NORM


GOLDEN_LINEAR = [[229, 107, -253, 141], [-79, -215, 173, 171], [-87, 43, 201, 25]]
GOLDEN_NORM = [129, 126, 128, 133, 135, 126, 125, 125, 132, 121, 130, 127]


def test_the_spread() -> None:
    values = whole("w", (1000, 1000)).astype(np.float64)
    assert values.std() == pytest.approx(256 / 12**0.5 * 2 * 2**-13, rel=0.003)
    assert abs(values.mean()) < 1e-4 and np.abs(values).max() == 255 * 2**-13
    counts = np.bincount(((values.reshape(-1) * 2**13 + 255) / 2).astype(int), minlength=256)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 340  # chi squared of 255: 1 in 3000
    for lag in (1, 2, 3, 4, 1000, 4000):
        flat = values.reshape(-1)
        assert abs(np.corrcoef(flat[:-lag], flat[lag:])[0, 1]) < 0.005


def test_norms_are_near_one_and_nothing_else_is() -> None:
    for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight", "l.self_attn.q_norm.weight"):
        values = whole(name, (4096,)).astype(np.float32)
        assert values.min() == 1 - 8 / 128 and values.max() == 1 + 7 / 128
    for name, shape in {"model.norm.weight": (64, 64), "norm.bias": (4096,), "bias": (4096,)}.items():
        assert np.abs(whole(name, shape).astype(np.float32)).max() < 0.032


def test_names_and_seeds_give_different_values() -> None:
    base = whole("model.layers.0.w", (500, 500)).astype(np.float64).reshape(-1)
    others = [
        ("model.layers.1.w", 0),
        ("model.layers.0.v", 0),
        ("model.layers.0.w", 1),
        ("odel.layers.0.w", 0),
    ]
    for name, seed in others:
        other = whole(name, (500, 500), seed).astype(np.float64).reshape(-1)
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.01
        # Nor are the two the same values in another order.
        assert (np.sort(base) != np.sort(other)).any()


def test_it_reads_nothing_and_needs_little_memory() -> None:
    checkpoint = DummyCheckpoint({"w": (4096, 4096)}, 0)
    tracemalloc.start()
    values = checkpoint.read("w", Span(0, 4096))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - values.nbytes < 4 << 20
    assert checkpoint.bytes_read == 0
    checkpoint.close()


def test_what_is_not_there() -> None:
    checkpoint = DummyCheckpoint({"w": (4, 4)}, 5)
    with pytest.raises(CheckpointError, match=r"random weights \(seed 5\): there is no tensor 'v'"):
        checkpoint.read("v", Span(0, 1))
    with pytest.raises(CheckpointError, match=r"random weights \(seed 5\): tensor 'w'.* no slice \[0:5\]"):
        checkpoint.read("w", Span(0, 5))
