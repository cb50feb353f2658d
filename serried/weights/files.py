"""What the formats of checkpoint files share: the reading of a file, and the checks of slices and extents."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from serried.errors import CheckpointError
from serried.parallel.reduction import Span
from serried.weights.checkpoint import Array, TensorInfo

READ_PIECE = 16 << 20

READABLE: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
FP8: Mapping[str, np.dtype[Any]] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}


class DataFile:
    """A file read with pread alone: mapped pages would count in the peak memory of a rank.

    `bytes_read` counts tensor data, not headers. Raises CheckpointError where the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        if not path.is_file():
            raise self.error("is not a file" if path.exists() else "no such file")
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self.error(f"cannot be opened: {error.strerror}") from error
        self.size = os.fstat(self._fd).st_size

    def error(self, what: str, tensor: str | None = None) -> CheckpointError:
        """The error to raise about this file, or about a tensor in it."""
        return CheckpointError(f"{self.path}: " + (f"tensor {tensor!r}: " if tensor is not None else "") + what)

    def read_into(self, view: memoryview, offset: int, tensor: str | None = None) -> None:
        """Fill a view of bytes from `offset` on, in pieces."""
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done : done + READ_PIECE]], offset + done)
            except OSError as error:
                raise self.error(f"cannot be read: {error.strerror}", tensor) from error
            if not got:
                raise self.error(f"truncated: it ends before byte {offset + len(view)}", tensor)
            done += got

    def read_bytes(self, offset: int, count: int) -> bytes:
        """`count` bytes of a header."""
        buffer = bytearray(count)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def read_matrix(self, tensor: str, offset: int, stride: int, shape: tuple[int, int]) -> npt.NDArray[np.uint8]:
        """Bytes [rows, width], of which row i lies at offset + i * stride; no other bytes are read."""
        rows, width = shape
        out = np.empty(shape, np.uint8)
        view = out.reshape(rows * width).data
        if width == stride:
            self.read_into(view, offset, tensor)
        else:
            for i in range(rows):
                self.read_into(view[i * width : (i + 1) * width], offset + i * stride, tensor)
        self.bytes_read += out.nbytes
        return out

    def read_plain(
        self,
        tensor: str,
        info: TensorInfo,
        offset: int,
        dtype: np.dtype[Any],
        rows: Span,
        columns: Span | None,
    ) -> Array:
        """A slice of a row-major tensor of a plain dtype that starts at `offset`."""
        shape = slice_shape(tensor, info, rows, columns)
        stride = math.prod(info.shape[1:]) * dtype.itemsize
        first = rows.start * stride + (columns.start * dtype.itemsize if columns else 0)
        width = math.prod(shape[1:]) * dtype.itemsize
        return self.read_matrix(tensor, offset + first, stride, (rows.size, width)).view(dtype).reshape(shape)

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def slice_shape(tensor: str, info: TensorInfo, rows: Span, columns: Span | None) -> tuple[int, ...]:
    """The shape of a slice of a tensor. Raises CheckpointError where the tensor has no such slice."""
    wanted = [rows] if columns is None else [rows, columns]
    fits = len(wanted) <= len(info.shape) and (columns is None or len(info.shape) == 2)
    if not fits or any(not 0 <= s.start <= s.stop <= size for s, size in zip(wanted, info.shape, strict=False)):
        slices = ", ".join(f"{s.start}:{s.stop}" for s in wanted)
        raise CheckpointError(f"{info.file}: tensor {tensor!r}: shape {list(info.shape)} has no slice [{slices}]")
    return tuple(s.size for s in wanted) + info.shape[len(wanted) :]


def check_extents(file: DataFile, extents: Iterable[tuple[str, int, int]]) -> None:
    """Raise CheckpointError where two tensors, given as (name, offset, bytes), share a byte."""
    last, edge = "", 0
    for name, offset, nbytes in sorted(extents, key=lambda extent: extent[1:]):
        if nbytes and offset < edge:
            raise file.error(f"its data overlaps that of tensor {last!r}", name)
        if nbytes:
            last, edge = name, offset + nbytes
