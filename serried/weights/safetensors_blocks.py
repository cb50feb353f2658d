"""Quantized tensors in safetensors files: the fields of a method's blocks, each in a tensor of its own.

A file declares them in its metadata: under `serried.quantization`, JSON of {NAME: [method, columns]}. Then NAME,
NAME_scale and so on hold the fields of the method's blocks, [rows, groups * elements of a field]. The last group of
a row is filled up with zeros, which is why the true number of columns stands in the declaration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from serried.parallel.reduction import Span
from serried.quant.method import GROUP, Bytes, Method, Part, groups_of
from serried.quant.registry import METHODS
from serried.quant.rows import QuantizedRows
from serried.weights.checkpoint import Array, TensorInfo
from serried.weights.files import READABLE, DataFile, slice_shape

DECLARATION = "serried.quantization"
MAX_COLUMNS = 1 << 40
_ITEMSIZE = {"F16": 2, "I8": 1, "U8": 1}
_DTYPES: Mapping[str, Any] = {"F16": np.float16, "I8": np.int8, "U8": np.uint8}


class Stored(NamedTuple):
    """Where a tensor lies."""

    info: TensorInfo
    file: DataFile
    offset: int
    nbytes: int

    def read(self, name: str, dtypes: Mapping[str, np.dtype[Any]], rows: Span, columns: Span | None) -> Array:
        """A slice, where its dtype is one of these."""
        kind = self.info.format
        if kind not in dtypes:
            raise self.file.error(f"dtype {kind} cannot be read; convert it to {', '.join(READABLE)}", name)
        return self.file.read_plain(name, self.info, self.offset, dtypes[kind], rows, columns)


class Blocks(NamedTuple):
    """A quantized tensor; `parts` are where the fields of its blocks lie."""

    name: str
    info: TensorInfo
    method: Method
    parts: tuple[Stored, ...]

    def read(self, rows: Span, columns: Span | None) -> QuantizedRows | None:
        """Rows as blocks; None where the columns do not start with a group."""
        slice_shape(self.name, self.info, rows, columns)
        columns = columns or Span(0, self.info.shape[1])
        return None if columns.start % GROUP else self._read(rows, columns)

    def read_values(self, rows: Span, columns: Span | None) -> Array:
        """Rows as float32; the columns may start anywhere."""
        slice_shape(self.name, self.info, rows, columns)
        columns = columns or Span(0, self.info.shape[1])
        inside = columns.start % GROUP
        return self._read(rows, Span(columns.start - inside, columns.stop)).values()[:, inside:]

    def _read(self, rows: Span, columns: Span) -> QuantizedRows:
        groups = Span(columns.start // GROUP, groups_of(columns.stop))
        blocks = np.empty((rows.size, groups.size, self.method.block_bytes), np.uint8)
        for part, stored in zip(self.method.parts, self.parts, strict=True):
            width = part.nbytes
            stride = groups_of(self.info.shape[1]) * width
            offset = stored.offset + rows.start * stride + groups.start * width
            raw = stored.file.read_matrix(self.name + part.suffix, offset, stride, (rows.size, groups.size * width))
            blocks[:, :, part.start : part.stop] = raw.reshape(rows.size, groups.size, width)
        return QuantizedRows(
            self.method, columns.size, blocks.reshape(rows.size, groups.size * self.method.block_bytes)
        )


def part_shape(part: Part, rows: int, columns: int) -> tuple[int, int]:
    """The shape of the tensor that holds a field."""
    return rows, groups_of(columns) * part.nbytes // _ITEMSIZE[part.dtype]


def declare(tensors: Mapping[str, tuple[Method, int]]) -> dict[str, str]:
    """The metadata of a file with quantized tensors, given as name -> (method, columns)."""
    return {DECLARATION: json.dumps({name: [method.name, columns] for name, (method, columns) in tensors.items()})}


def split_blocks(method: Method, blocks: Bytes) -> list[tuple[Part, Array]]:
    """The fields of blocks [rows, row_bytes], each as [rows, groups * elements] of its dtype."""
    rows, groups = blocks.shape[0], blocks.shape[1] // method.block_bytes
    apart = blocks.reshape(rows, groups, method.block_bytes)
    return [
        (part, apart[:, :, part.start : part.stop].reshape(rows, groups * part.nbytes).view(_DTYPES[part.dtype]))
        for part in method.parts
    ]


def take_blocks(file: DataFile, stored: dict[str, Stored], declaration: Any) -> dict[str, Blocks]:
    """The quantized tensors that a file declares, whose parts are taken out of `stored`.

    Raises CheckpointError where the declaration and the tensors do not fit each other.
    """
    if declaration is None:
        return {}
    try:
        declared = json.loads(declaration)
        entries = [(name, METHODS[method], columns) for name, (method, columns) in declared.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise file.error(f"its metadata {DECLARATION} cannot be read: {error!r}") from None
    return {name: _take(file, stored, name, method, columns) for name, method, columns in entries}


def _take(file: DataFile, stored: dict[str, Stored], name: str, method: Method, columns: Any) -> Blocks:
    if type(columns) is not int or not 0 <= columns < MAX_COLUMNS:
        raise file.error(f"is declared to have {columns!r} columns", name)
    parts = []
    for part in method.parts:
        found = stored.pop(name + part.suffix, None)
        if found is None:
            raise file.error(f"is missing, but {name} is declared to be {method.name}", name + part.suffix)
        rows = found.info.shape[0] if found.info.shape else 0
        wanted = part_shape(part, rows, columns)
        if (found.info.format, found.info.shape) != (part.dtype, wanted):
            raise file.error(
                f"is {found.info.format} {list(found.info.shape)}; {method.name} of {columns} columns takes "
                f"{part.dtype} {list(wanted)}",
                name + part.suffix,
            )
        parts.append(found)
    if len({found.info.shape[0] for found in parts}) != 1:
        raise file.error("its parts have different numbers of rows", name)
    info = TensorInfo((parts[0].info.shape[0], columns), method.name, str(file.path), method)
    return Blocks(name, info, method, tuple(parts))
