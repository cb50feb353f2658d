"""QuantizedRows: rows of a weight as blocks; and how they are made, in C++ where there is any."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from serried.quant.kernels import native_kernels
from serried.quant.method import Bytes, Floats, Method, groups_of


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of a weight in the blocks of a method: uint8 [rows, method.row_bytes(columns)]."""

    method: Method
    columns: int
    blocks: Bytes

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0], self.columns

    def halves(self) -> list[npt.NDArray[np.float16]]:
        """The scales, and the minima where there are any: float16 [rows, groups, 1] each."""
        apart = self.blocks.reshape(self.blocks.shape[0], groups_of(self.columns), self.method.block_bytes)
        fields = [part for part in self.method.parts if part.dtype == "F16"]
        return [apart[:, :, field.start : field.stop].view(np.float16) for field in fields]

    def values(self) -> Floats:
        """The numbers that these rows stand for: float32 [rows, columns]."""
        return self.method.dequantize(self.blocks, self.columns)


def quantize_rows(method: Method, values: npt.NDArray[np.generic]) -> QuantizedRows:
    """Quantize [rows, columns] of float32, float16 or bfloat16. The same bits with and without the extension."""
    rows, columns = values.shape
    kernels = native_kernels()
    if kernels is None or not values.size:
        return QuantizedRows(method, columns, method.quantize(values))
    if values.dtype not in (np.float32, ml_dtypes.bfloat16):
        values = values.astype(np.float32)
    values = np.ascontiguousarray(values)
    blocks = np.empty((rows, method.row_bytes(columns)), np.uint8)
    source = (values.ctypes.data, values.dtype.name, rows, columns, columns)
    kernels.quantize(method.name, *source, blocks.ctypes.data, blocks.shape[1])
    return QuantizedRows(method, columns, blocks)
