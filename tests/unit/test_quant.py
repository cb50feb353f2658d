"""The methods against the gguf library, bit by bit; and which parameter gets which."""

from __future__ import annotations

from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from serried.quant import q4_k
from serried.quant.int4 import INT4, INT4_MIN
from serried.quant.int8 import INT8
from serried.quant.method import GROUP, Method, groups_of
from serried.quant.registry import METHODS, method_of_ggml
from serried.quant.rows import QuantizedRows, quantize_rows
from serried.quant.select import choose_method

ALL = list(METHODS.values())


def weights(rows: int, columns: int, seed: int = 0) -> Any:
    """Random rows of all magnitudes: groups of zeros, of one value, with ties, and within float16's subnormals."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-6, 4, (rows, 1))
    values[::5] = 0
    values[1::5] = 0.75
    values[2::5] = rng.integers(-8, 8, values[2::5].shape) * 0.5
    return values.astype(np.float32)


def padded(values: Any) -> Any:
    """With zeros up to whole groups, as the library wants them."""
    rows, columns = values.shape
    wide = np.zeros((rows, groups_of(columns) * GROUP), np.float32)
    wide[:, :columns] = values
    return wide


def library(method: Method) -> GGMLQuantizationType:
    return GGMLQuantizationType[method.ggml]


@pytest.mark.parametrize("method", ALL, ids=lambda m: m.name)
@pytest.mark.parametrize("columns", [1, 32, 33, 173, 256])
def test_the_bits_are_the_librarys(method: Method, columns: int) -> None:
    values = weights(41, columns)
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(padded(values), library(method))
        numbers = gguf.quants.dequantize(expected, library(method))
    for given_as in (np.float32, ml_dtypes.bfloat16, np.float16):
        exact = values.astype(given_as)
        with np.errstate(all="ignore"):
            wanted = gguf.quants.quantize(padded(exact.astype(np.float32)), library(method))
        assert np.array_equal(method.quantize(exact), wanted)
        assert np.array_equal(quantize_rows(method, exact).blocks, wanted)  # in C++, where there is any
    assert np.array_equal(method.dequantize(expected, columns), numbers[:, :columns])


def test_bits_of_a_weight() -> None:
    assert [(method.name, method.bits) for method in ALL] == [("int8", 8.5), ("int4", 4.5), ("int4_min", 5.0)]
    for method in ALL:
        assert method.block_bytes == gguf.GGML_QUANT_SIZES[library(method)][1]
        assert [part.start for part in method.parts] == [0, *(part.stop for part in method.parts[:-1])]


@pytest.mark.parametrize("method", ALL, ids=lambda m: m.name)
def test_quantizing_twice_changes_nothing_more(method: Method) -> None:
    """The numbers that blocks stand for, quantized anew, stand for the same numbers but for a rounding of the scale."""
    once = quantize_rows(method, weights(20, 96)).values()
    again = quantize_rows(method, once).values()
    assert np.abs(again - once).max() <= np.abs(once).max() * 2.0**-9


@settings(max_examples=40, deadline=None)
@given(method=st.sampled_from(ALL), columns=st.integers(1, 200), start=st.integers(0, 6), rows=st.integers(0, 4))
def test_a_slice_quantizes_like_the_whole(method: Method, columns: int, start: int, rows: int) -> None:
    """Groups lie along the columns, so a shard that starts with one has the very blocks of the whole tensor."""
    first = min(start, groups_of(columns) - 1)
    values = weights(rows, columns, seed=columns)
    whole = quantize_rows(method, values).blocks
    part = quantize_rows(method, values[:, first * GROUP :]).blocks
    assert np.array_equal(part, whole[:, first * method.block_bytes :])


def test_rows_without_columns() -> None:
    for method in ALL:
        empty = quantize_rows(method, np.empty((3, 0), np.float32))
        assert (empty.shape, empty.blocks.shape, empty.values().shape) == ((3, 0), (3, 0), (3, 0))


def random_q4_k(rows: int, superblocks: int) -> Any:
    rng = np.random.default_rng(4)
    raw = rng.integers(0, 256, (rows * superblocks, q4_k.SUPERBLOCK_BYTES)).astype(np.uint8)
    raw[:, :4] = rng.uniform(0, 0.01, (rows * superblocks, 2)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def test_q4_k_keeps_its_digits() -> None:
    """As int4 with minimum: the library's numbers, but for scales and minima rounded to float16."""
    raw = random_q4_k(7, 3)
    rows = QuantizedRows(INT4_MIN, 768, q4_k.repack_q4_k(raw))
    expected = gguf.quants.dequantize(raw, GGMLQuantizationType.Q4_K)
    scale, minimum = (np.abs(expected).max(), np.abs(expected.min()))
    assert 0 < np.abs(rows.values() - expected).max() <= (scale + minimum) * 2.0**-11
    in_numpy = q4_k._repack(raw.reshape(-1, q4_k.SUPERBLOCK_BYTES))
    assert np.array_equal(in_numpy.reshape(7, -1), rows.blocks)


# --- Which parameter gets which ---

F32 = None


@pytest.mark.parametrize(
    ("option", "kind", "stored", "chosen"),
    [
        # As the file has it.
        (None, "linear", [F32], None),
        (None, "linear", [INT8], INT8),
        (None, "embedding", [INT4], INT4),
        (None, "head", [INT4_MIN], INT4_MIN),
        (None, "vector", [INT8], None),
        (None, "linear", [INT4, INT4_MIN, INT4], INT4_MIN),
        (None, "linear", [INT4_MIN, INT8], INT8),
        (None, "linear", [INT4, F32, INT4], None),
        # Dequantized.
        ("none", "linear", [INT8], None),
        ("none", "embedding", [F32], None),
        # Quantized while loading.
        ("int8", "linear", [F32, F32], INT8),
        ("int8", "embedding", [INT4], INT8),
        ("int8", "vector", [F32], None),
        ("int4", "linear", [F32], INT4_MIN),
        ("int4", "linear", [INT8], INT4_MIN),
        ("int4", "linear", [INT4, INT4], INT4),
        ("int4", "linear", [INT4, F32], INT4_MIN),
        ("int4", "embedding", [F32], INT8),
        ("int4", "head", [INT4], INT8),
        ("int4", "vector", [F32], None),
    ],
)
def test_choice(option: str | None, kind: str, stored: list[Method | None], chosen: Method | None) -> None:
    assert choose_method(option, kind, stored) is chosen


def test_what_types_of_ggml_are_kept_in() -> None:
    kept = {"Q8_0": INT8, "Q4_0": INT4, "Q4_1": INT4_MIN, "Q4_K": INT4_MIN, "Q5_K": INT8, "Q6_K": INT8, "IQ4_NL": INT8}
    assert {kind: method_of_ggml(kind) for kind in kept} == kept
