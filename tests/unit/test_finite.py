"""The search for NaN and infinity by bits against NumPy's own."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serried.errors import CheckpointError
from serried.parallel.reduction import Span
from serried.weights.checkpoint import TensorInfo
from serried.weights.finite import all_finite, check_finite

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_pattern_of_16_bits(dtype: Any) -> None:
    """Each alone, and all finite ones together."""
    patterns = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(patterns)
    assert all_finite(patterns[finite])
    assert [all_finite(patterns[i : i + 1]) for i in range(0, 1 << 16, 7)] == finite[::7].tolist()


@given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0x7F7FFFFF, 0x7F800000, 0xFF7FFFFF, 0xFFFFFFFF])))
def test_float32(patterns: list[int]) -> None:
    values = np.array(patterns, np.uint32).view(np.float32)
    assert all_finite(values) == bool(np.isfinite(values).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.filterwarnings("error")
def test_the_place_is_that_in_the_whole_tensor(dtype: Any, value: float) -> None:
    values = np.ones((5, 7), dtype)
    info = TensorInfo((100, 100), "F32", "some.file")
    check_finite("w", info, values, Span(40, 45), Span(10, 17))
    values[3, 4] = value
    values[4, 0] = value
    for given_values, columns, place in ((values, Span(10, 17), "43, 14"), (values, None, "43, 4")):
        with pytest.raises(CheckpointError, match=rf"some\.file: tensor 'w': element \[{place}\] is -?(nan|inf): "):
            check_finite("w", info, given_values, Span(40, 45), columns)
    with pytest.raises(CheckpointError, match=r"element \[43\] is"):
        check_finite("w", info, np.ascontiguousarray(values[:, 4]), Span(40, 45))
    check_finite("w", info, values[:0], Span(40, 40))
