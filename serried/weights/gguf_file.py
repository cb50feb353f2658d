"""The container of GGUF files: metadata, and where the tensors lie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from serried.errors import CheckpointError
from serried.weights.files import DataFile, check_extents

_HEADER_PIECE = 1 << 20
_MAX_NESTING = 4
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = dict(enumerate(map(np.dtype, ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))))
_SCALARS |= {10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8")}


class BlockType(NamedTuple):
    """A type of GGML: its name; a block of `elements` takes `nbytes`."""

    name: str
    elements: int
    nbytes: int


TYPES: Mapping[int, BlockType] = {
    number: BlockType(name, elements, nbytes)
    for number, name, elements, nbytes in [
        (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40), (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136), (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8),
        (28, "F64", 1, 8), (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18),
    ]
}  # fmt: skip


class GGUFTensor(NamedTuple):
    """A tensor of a GGUF file: its shape (outermost first), its type, where its data starts in the file."""

    shape: tuple[int, ...]
    type: BlockType
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.elements * self.type.nbytes


class GGUFFile:
    """The metadata and tensors of a GGUF file (version 2 or 3, little-endian, not split).

    metadata: numbers, bools and strings; arrays as lists (of strings or arrays) or NumPy arrays (of numbers).
    Raises CheckpointError, naming file and tensor, where anything is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.data = DataFile(Path(path))
        try:
            header = _Header(self.data)
            tensor_count = header.start()
            self.metadata: dict[str, Any] = header.metadata
            if (parts := self.metadata.get("split.count", 1)) != 1:
                raise self.data.error(
                    f"is one of {parts} files of a split model: merge them by `llama-gguf-split --merge`"
                )
            self.tensors: dict[str, GGUFTensor] = header.tensors(tensor_count)
        except BaseException:
            self.data.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self.data.close()


class _Header:
    """A cursor over the start of the file, which reads on as it is needed."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._buffer = bytearray()
        self._at = 0
        self._doing = "the header"
        self.metadata: dict[str, Any] = {}

    def _error(self, what: str) -> CheckpointError:
        return self._file.error(f"{self._doing}: {what}")

    def _take(self, count: int) -> bytearray:
        end = self._at + count
        if end > len(self._buffer):
            self._room(count)
            missing = max(_HEADER_PIECE, end - len(self._buffer))
            missing = min(missing, self._file.size - len(self._buffer))
            self._buffer += self._file.read_bytes(len(self._buffer), missing)
        taken = self._buffer[self._at : end]
        self._at = end
        return taken

    def _room(self, count: int) -> None:
        left = self._file.size - self._at
        if count > left:
            raise self._error(f"truncated: takes {count} bytes or more, and {left} are left of the file")

    def _number(self, nbytes: int) -> int:
        return int.from_bytes(self._take(nbytes), "little")

    def _string(self) -> str:
        raw = self._take(int.from_bytes(self._take(8), "little"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._error(f"not valid UTF-8: {raw[:40]!r}") from error

    def start(self) -> int:
        """Parse all up to the tensors into `metadata`; the number of tensors."""
        if (magic := self._take(4)) != b"GGUF":
            raise self._error(f"not a GGUF file: it starts with {bytes(magic)!r}")
        version = self._number(4)
        if version & 0xFFFF == 0:
            raise self._error("big-endian GGUF files cannot be read; convert the model to a little-endian one")
        if version not in {2, 3}:
            raise self._error(f"GGUF version {version} cannot be read, only 2 and 3; convert the model again")
        tensors, pairs = self._number(8), self._number(8)
        # The least that a pair and a tensor take: a count that cannot be true ends here, not in a long loop.
        self._room(pairs * 13 + tensors * 32)
        for i in range(pairs):
            self._doing = f"metadata entry {i}"
            key = self._string()
            self._doing = f"metadata {key!r}"
            if key in self.metadata:
                raise self._error("appears twice")
            self.metadata[key] = self._value(self._number(4), 0)
        return tensors

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        return self._scalars(kind, 1)[0].item()

    def _array(self, depth: int) -> Any:
        kind, count = self._number(4), self._number(8)
        if kind not in {_STRING, _ARRAY}:
            return self._scalars(kind, count)
        if depth > _MAX_NESTING:
            raise self._error("arrays are nested too deeply")
        self._room(count * (8 if kind == _STRING else 12))
        return [self._value(kind, depth) for _ in range(count)]

    def _scalars(self, kind: int, count: int) -> npt.NDArray[Any]:
        if kind not in _SCALARS:
            raise self._error(f"unknown type {kind}")
        raw = self._take(count * _SCALARS[kind].itemsize)
        values: npt.NDArray[Any] = np.frombuffer(raw, np.uint8 if kind == _BOOL else _SCALARS[kind])
        return values != 0 if kind == _BOOL else values

    def tensors(self, count: int) -> dict[str, GGUFTensor]:
        """Parse and check the tensor infos, which follow the metadata."""
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._file.error(f"general.alignment {alignment!r} is not a power of two")
        found: dict[str, GGUFTensor] = {}
        for i in range(count):
            self._doing = f"tensor info {i}"
            name = self._string()
            self._doing = f"tensor {name!r}"
            if name in found:
                raise self._error("appears twice")
            found[name] = self._tensor()
        data = -(-self._at // alignment) * alignment
        for name, tensor in found.items():
            if tensor.offset % alignment:
                raise self._file.error(f"offset {tensor.offset} is not a multiple of {alignment}", name)
            if data + tensor.offset + tensor.nbytes > self._file.size:
                end = data + tensor.offset + tensor.nbytes
                raise self._file.error(f"truncated: its data ends at byte {end} of a file of {self._file.size}", name)
            found[name] = tensor._replace(offset=data + tensor.offset)
        check_extents(self._file, [(name, t.offset, t.nbytes) for name, t in found.items()])
        return found

    def _tensor(self) -> GGUFTensor:
        dimensions = self._number(4)
        if not 1 <= dimensions <= 4:
            raise self._error(f"{dimensions} dimensions (1 to 4 are possible)")
        # Innermost first in the file.
        shape = tuple(self._number(8) for _ in range(dimensions))[::-1]
        kind, offset = self._number(4), self._number(8)
        if kind not in TYPES:
            raise self._error(f"unknown type {kind} (not one of GGML's, or newer than this reader)")
        if 0 in shape:
            raise self._error(f"impossible shape {list(shape)}")
        if shape[-1] % TYPES[kind].elements:
            raise self._error(f"rows of {shape[-1]} are not made of whole blocks of {TYPES[kind].name}")
        return GGUFTensor(shape, TYPES[kind], offset)
