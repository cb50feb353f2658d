"""Writing safetensors files: as a stream, tensor by tensor, or several tensors side by side."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from serried.weights.checkpoint import Array
from serried.weights.files import READABLE

WRITABLE: Mapping[str, np.dtype[Any]] = {**READABLE, "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8)}


class Entry(NamedTuple):
    """A tensor of a file to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class TensorSource(NamedTuple):
    """A tensor to be written: `chunks` makes its elements, in order, as arrays of the dtype, any shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Array]]


class SafetensorsWriter:
    """A file that gets its name when it is complete: `with` it, and append to each tensor in order.

    dtypes: F32, F16, BF16, I8, U8. Raises ValueError where what is appended does not make the tensors.
    """

    def __init__(self, path: str | Path, entries: Iterable[Entry], **metadata: str) -> None:
        self._path = Path(path)
        # Wide elements first, so that every tensor is aligned to its own element.
        ordered = sorted(entries, key=lambda entry: -WRITABLE[entry.dtype].itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"} | metadata}
        self._left: dict[str, tuple[str, int]] = {}  # dtype, and elements that are still to come
        self._next: dict[str, int] = {}  # where they go
        end = 0
        for name, dtype, shape in ordered:
            begin, end = end, end + math.prod(shape) * WRITABLE[dtype].itemsize
            if name in header:
                raise ValueError(f"tensor {name!r} is given twice")
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
            self._left[name], self._next[name] = (dtype, math.prod(shape)), begin
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        self._head = len(raw).to_bytes(8, "little") + raw
        self._size = len(self._head) + end
        self._temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> SafetensorsWriter:
        self._file = self._temporary.open("wb")
        self._file.write(self._head)
        return self

    def append(self, name: str, chunk: Array) -> None:
        """The next elements of a tensor."""
        dtype, left = self._left[name]
        if chunk.dtype != WRITABLE[dtype] or chunk.size > left:
            raise ValueError(f"tensor {name!r}: a chunk {chunk.dtype} {chunk.shape} does not fit")
        self._file.seek(len(self._head) + self._next[name])
        self._file.write(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)
        self._left[name] = dtype, left - chunk.size
        self._next[name] += chunk.nbytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if kind is not None:
                    return
                for name, (_, left) in self._left.items():
                    if left:
                        raise ValueError(f"tensor {name!r}: {left} elements are missing")
                self._file.flush()
                os.fsync(self._file.fileno())
            self._temporary.replace(self._path)
        finally:
            self._temporary.unlink(missing_ok=True)


def write_safetensors(path: str | Path, tensors: Iterable[TensorSource], **metadata: str) -> None:
    """Write a file, one chunk in memory at a time."""
    sources = list(tensors)
    with SafetensorsWriter(path, [Entry(*source[:3]) for source in sources], **metadata) as writer:
        for source in sources:
            for chunk in source.chunks():
                writer.append(source.name, chunk)
