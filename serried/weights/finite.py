"""NaN and infinity among weights, which would spread to every logit: found while the weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from serried.errors import CheckpointError
from serried.parallel.reduction import Span
from serried.quant.rows import QuantizedRows
from serried.weights.checkpoint import Array, TensorInfo

# The bits of infinity. Those of every NaN are larger, those of every number smaller; the sign bit is above them.
_INFINITY: Mapping[np.dtype[Any], int] = {
    np.dtype(np.float32): 0x7F800000,
    np.dtype(np.float16): 0x7C00,
    np.dtype(ml_dtypes.bfloat16): 0x7F80,
}


def check_finite(
    name: str, info: TensorInfo, values: Array | QuantizedRows, rows: Span, columns: Span | None = None
) -> None:
    """Raise CheckpointError, with the place of the first, where a slice of a tensor holds NaN or infinity.

    values: what Checkpoint.read or read_blocks has given for these rows and columns. Of blocks only the scales and
    minima can be other than finite, and where one is, every number of its group is.
    """
    if isinstance(values, QuantizedRows):
        if all(map(all_finite, values.halves())):
            return
        values = values.values()
    elif all_finite(values):
        return
    with np.errstate(invalid="ignore"):
        bad = ~np.isfinite(values)
    place = [int(i) for i in np.unravel_index(int(bad.argmax()), values.shape)]
    value = values[tuple(place)]
    place[0] += rows.start
    if columns is not None:
        place[1] += columns.start
    where = ", ".join(map(str, place))
    raise CheckpointError(
        f"{info.file}: tensor {name!r}: element [{where}] is {value}: the file is damaged, or was made from weights "
        f"that {info.format} cannot hold"
    )


def all_finite(values: Array) -> bool:
    """Whether an array of float32, float16 or bfloat16 holds neither NaN nor infinity.

    Two maxima of integers, at the speed of memory: among signed integers the positive NaN and infinities are the
    largest of all, among unsigned ones the negative are.
    """
    if not values.size:
        return True
    infinity, size = _INFINITY[values.dtype], values.dtype.itemsize
    negative = infinity | 1 << (8 * size - 1)
    return bool(values.view(f"i{size}").max() < infinity and values.view(f"u{size}").max() < negative)
