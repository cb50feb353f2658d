"""Checkpoints of eight-bit floats with scales beside them: dequantized while they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from serried.errors import CheckpointError
from serried.parallel.reduction import Span
from serried.quant.method import Method
from serried.quant.rows import QuantizedRows
from serried.weights.checkpoint import Array, TensorInfo
from serried.weights.files import FP8
from serried.weights.finite import check_finite
from serried.weights.safetensors import SafetensorsCheckpoint

# Of X.weight. Both are multiplied with, whatever "inv" makes one think.
_SCALES = ("_scale_inv", "_scale")
# Scales of activations and of the KV cache, which stay unquantized here.
_ACTIVATIONS = ("input", "activation", "output", "q", "k", "v", "prob")
_OF_ACTIVATIONS = (".input_scale_ub", *(f".{name}_scale" for name in _ACTIVATIONS))


class _Scale(NamedTuple):
    """A tensor's scales: their name and shape as a matrix, and how many rows and columns share one."""

    name: str
    shape: tuple[int, int]
    rows: int
    columns: int


class Fp8Checkpoint:
    """A safetensors checkpoint in which tensors of F8_E4M3 and F8_E5M2 have scales: read as float32.

    A scale is for the whole tensor, for each row, or for each block of `block` (rows, columns), as its shape says.
    The scales themselves are not among `tensors`. The checkpoint owns the other one.
    """

    def __init__(self, stored: SafetensorsCheckpoint, block: tuple[int, int] | None = None) -> None:
        self._stored = stored
        self._block = block
        self._last: tuple[str, npt.NDArray[np.float32]] | None = None
        quantized = {name: info for name, info in stored.tensors.items() if info.format in FP8}
        self._scales = {name: self._find_scale(name, info) for name, info in quantized.items()}
        hidden = {scale.name for scale in self._scales.values()}
        self.tensors: Mapping[str, TensorInfo] = {
            name: info
            for name, info in stored.tensors.items()
            if name not in hidden and not name.endswith(_OF_ACTIVATIONS)
        }

    def read(self, name: str, rows: Span, columns: Span | None = None) -> Array:
        """See Checkpoint.read."""
        scale = self._scales.get(name)
        if scale is None:
            return self._stored.read(name, rows, columns)
        raw = self._stored.read_fp8(name, rows, columns)
        # mode: indices of 8 bits are always in range; "raise" would go through another buffer.
        values = np.take(_values(raw.dtype), raw.view(np.uint8), mode="wrap")
        matrix = values.reshape(rows.size, math.prod(values.shape[1:]))
        columns = columns or Span(0, matrix.shape[1])
        first = rows.start // scale.rows
        bands = self._read_scale(scale)[first : -(-rows.stop // scale.rows)]
        factors = np.repeat(bands, scale.rows, axis=0)[rows.start - first * scale.rows :][: rows.size]
        for band in range(columns.start // scale.columns, -(-columns.stop // scale.columns)):
            low = max(band * scale.columns - columns.start, 0)
            matrix[:, low : (band + 1) * scale.columns - columns.start] *= factors[:, band : band + 1]
        return values

    def read_blocks(self, name: str, rows: Span, columns: Span | None, method: Method) -> QuantizedRows | None:
        """See Checkpoint.read_blocks: there are none of eight-bit floats."""
        return None if name in self._scales else self._stored.read_blocks(name, rows, columns, method)

    def _find_scale(self, name: str, info: TensorInfo) -> _Scale:
        found = [name + suffix for suffix in _SCALES if name + suffix in self._stored.tensors]
        if not found:
            wanted = " or ".join(name + suffix for suffix in _SCALES)
            raise CheckpointError(f"{info.file}: tensor {name!r}: its scale, {wanted}, is missing")
        scale = self._stored.tensors[found[0]]
        rows, columns = info.shape[0] if info.shape else 1, math.prod(info.shape[1:])
        if scale.shape in {(), (1,), (1, 1)}:
            return _Scale(found[0], (1, 1), max(rows, 1), max(columns, 1))
        if scale.shape in {(rows,), (rows, 1)}:
            return _Scale(found[0], (rows, 1), 1, max(columns, 1))
        if self._block:
            blocks = -(-rows // self._block[0]), -(-columns // self._block[1])
            if scale.shape == blocks:
                return _Scale(found[0], blocks, *self._block)
        each = f", or one a block of {list(self._block)}" if self._block else ""
        raise CheckpointError(
            f"{scale.file}: tensor {found[0]!r}: shape {list(scale.shape)} does not fit {name} of shape "
            f"{list(info.shape)}: expected one scale, or one a row{each}"
        )

    def _read_scale(self, scale: _Scale) -> npt.NDArray[np.float32]:
        """All scales of a tensor as a matrix; those of the last one are kept, since the next slice wants them too."""
        if self._last is None or self._last[0] != scale.name:
            values = self._stored.read_whole(scale.name).astype(np.float32).reshape(scale.shape)
            check_finite(scale.name, self._stored.tensors[scale.name], values, Span(0, scale.shape[0]))
            self._last = scale.name, values
        return self._last[1]

    @property
    def bytes_read(self) -> int:
        return self._stored.bytes_read

    def close(self) -> None:
        """Close the files."""
        self._stored.close()


@cache
def _values(dtype: np.dtype[Any]) -> npt.NDArray[np.float32]:
    """What the 256 patterns of an eight-bit float stand for."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
