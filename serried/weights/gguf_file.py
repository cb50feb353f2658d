"""The container of GGUF files: metadata, and where the tensors lie."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from serried.errors import CheckpointError
from serried.weights.files import DataFile

_HEADER_PIECE = 1 << 20
_MAX_NESTING = 4
_MAX_STRINGS = 1 << 21  # of an array; vocabularies and lists of merges hold some 10^5, a damaged count may say anything
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
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
    """A tensor of a GGUF file: its shape (outermost first), its type, its file, and where in it its data starts."""

    shape: tuple[int, ...]
    type: BlockType
    file: DataFile
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.elements * self.type.nbytes


class GGUFFile:
    """The metadata and tensors of a GGUF file (version 2 or 3, little-endian).

    A model split as llama-gguf-split does it (NAME-00001-of-00003.gguf) is opened by any of its files; all must be
    there. data: the file, the first of several. files: all of them. metadata: of the first file: numbers, bools and
    strings; arrays as lists (of strings or arrays) or NumPy arrays (of numbers). Raises CheckpointError, naming file
    and tensor, where anything is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.files: list[DataFile] = []
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            headers = self._open(Path(path))
            self.data = headers[0].file
            self.metadata: dict[str, Any] = headers[0].metadata
            for header in headers:
                self._add(header)
            total = headers[0].integer("split.tensors.count", len(self.tensors))
            if len(headers) > 1 and total != len(self.tensors):
                raise self.data.error(
                    f"split.tensors.count is {total}, but its {len(headers)} files hold {len(self.tensors)} tensors"
                )
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> list[_Header]:
        """The header of a file, or the headers of all parts in order."""
        given = self._header(path)
        count = given.integer("split.count", 0)
        if count <= 1:  # 0: the parts were merged
            return [given]
        headers = []
        for number, part in enumerate(_part_paths(given.file, count)):
            if not part.is_file():
                raise CheckpointError(f"{part}: no such file; {path} is one of {count} files of a split model")
            header = given if part.name == path.name else self._header(part)
            said = header.integer("split.no", 0), header.integer("split.count", 0)
            if said != (number, count):
                raise header.file.error(f"is file {said[0] + 1} of {said[1]} of a split model, not what its name says")
            headers.append(header)
        return headers

    def _header(self, path: Path) -> _Header:
        file = DataFile(path)
        self.files.append(file)
        return _Header(file)

    def _add(self, header: _Header) -> None:
        for name, tensor in header.tensors().items():
            if name in self.tensors:
                raise header.file.error(f"is in {self.tensors[name].file.path} too", name)
            self.tensors[name] = tensor

    def close(self) -> None:
        """Close all files."""
        for file in self.files:
            file.close()


def _part_paths(file: DataFile, count: int) -> list[Path]:
    """The files of a split model, from the name of one of them."""
    match = _PART.fullmatch(file.path.name)
    if match is None or int(match["count"]) != count:
        raise file.error(
            f"is one of {count} files of a split model, but its name does not end in -00001-of-{count:05}.gguf or the "
            "like, by which the others would be found: rename them, or merge them by `llama-gguf-split --merge`"
        )
    return [file.path.with_name(f"{match['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


class _Header:
    """A cursor over the start of the file, which reads on as it is needed. `metadata` is parsed at once."""

    def __init__(self, file: DataFile) -> None:
        self.file = file
        self._buffer = bytearray()
        self._at = 0
        self._doing = "the header"
        self.metadata: dict[str, Any] = {}
        self._tensor_count = self._start()

    def integer(self, key: str, default: int) -> int:
        """A whole number of the metadata."""
        value = self.metadata.get(key, default)
        if type(value) is not int:
            raise self.file.error(f"{key} {value!r} is not a whole number")
        return value

    def _error(self, what: str) -> CheckpointError:
        return self.file.error(f"{self._doing}: {what}")

    def _take(self, count: int) -> bytearray:
        end = self._at + count
        if end > len(self._buffer):
            self._room(count)
            missing = max(_HEADER_PIECE, end - len(self._buffer))
            missing = min(missing, self.file.size - len(self._buffer))
            self._buffer += self.file.read_bytes(len(self._buffer), missing)
        taken = self._buffer[self._at : end]
        self._at = end
        return taken

    def _room(self, count: int) -> None:
        left = self.file.size - self._at
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

    def _start(self) -> int:
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
        if count > _MAX_STRINGS:
            raise self._error(f"truncated, or damaged: an array of {count} strings or arrays")
        self._room(count * (8 if kind == _STRING else 12))
        return [self._value(kind, depth) for _ in range(count)]

    def _scalars(self, kind: int, count: int) -> npt.NDArray[Any]:
        if kind not in _SCALARS:
            raise self._error(f"unknown type {kind}")
        raw = self._take(count * _SCALARS[kind].itemsize)
        values: npt.NDArray[Any] = np.frombuffer(raw, np.uint8 if kind == _BOOL else _SCALARS[kind])
        return values != 0 if kind == _BOOL else values

    def tensors(self) -> dict[str, GGUFTensor]:
        """Parse and check the tensor infos, which follow the metadata."""
        alignment = self.integer("general.alignment", 32)
        if alignment < 1 or alignment & (alignment - 1):
            raise self.file.error(f"general.alignment {alignment!r} is not a power of two")
        found: dict[str, GGUFTensor] = {}
        for i in range(self._tensor_count):
            self._doing = f"tensor info {i}"
            name = self._string()
            self._doing = f"tensor {name!r}"
            if name in found:
                raise self._error("appears twice")
            found[name] = self._tensor()
        data = -(-self._at // alignment) * alignment
        self._check_layout(found, data, alignment)
        return {name: tensor._replace(offset=data + tensor.offset) for name, tensor in found.items()}

    def _check_layout(self, found: Mapping[str, GGUFTensor], data: int, alignment: int) -> None:
        """Refuse what is not one tensor after the other, in the order of their infos, to the end of the file.

        No more would be needed to read them, but a damaged count, type or offset shows here.
        """
        end = data
        for name, tensor in found.items():
            begin = data + tensor.offset
            if begin + tensor.nbytes > self.file.size:
                size = self.file.size
                raise self.file.error(f"truncated: its data ends at byte {begin + tensor.nbytes} of {size}", name)
            if begin != end:
                raise self.file.error(f"its data starts at byte {begin}, but what is before it ends at {end}", name)
            end = -(-(begin + tensor.nbytes) // alignment) * alignment
        if self.file.size >= end + alignment:
            raise self.file.error(f"{self.file.size - end} bytes of data belong to no tensor")

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
        return GGUFTensor(shape, TYPES[kind], self.file, offset)
