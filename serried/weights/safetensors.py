"""Checkpoints in the safetensors format, read by the slice."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from serried.errors import CheckpointError
from serried.parallel.reduction import Span
from serried.quant.method import Method
from serried.quant.rows import QuantizedRows
from serried.weights.checkpoint import Array, TensorInfo
from serried.weights.files import FP8, READABLE, DataFile, check_extents
from serried.weights.safetensors_blocks import DECLARATION, Blocks, Stored, take_blocks

MAX_HEADER = 100_000_000
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 56

# Bits of an element, to check the extents of tensors that are listed but cannot be read too.
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4}
_BITS |= {"U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64}
_BITS |= {name: 8 * dtype.itemsize for name, dtype in READABLE.items()}

_PICKLES = (".bin", ".pt", ".pth")


class SafetensorsCheckpoint:
    """A .safetensors file, or a directory with model.safetensors or with an index and its shards.

    F32, F16 and BF16 can be read, and what `serried quantize` wrote; tensors of other dtypes are listed. tied: the
    names of an embedding and of the LM head that is the same matrix: one of them serves for both, and where the file
    has both they must be equal; a head beside a quantized embedding stays left over. Raises CheckpointError where
    anything is missing, damaged or said twice.
    """

    def __init__(self, path: str | Path, tied: tuple[str, str] | None = None) -> None:
        self._path = Path(path)
        self._files: list[DataFile] = []
        self._where: dict[str, DataFile] = {}
        self._stored: dict[str, Stored] = {}
        self._copies: dict[str, tuple[str, Stored]] = {}
        self._blocks: dict[str, Blocks] = {}
        try:
            self._open()
            if tied:
                self._tie(*tied)
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = {name: s.info for name, s in self._stored.items()} | {
            name: blocks.info for name, blocks in self._blocks.items()
        }

    def _open(self) -> None:
        weight_map: dict[str, str] = {}
        if not self._path.is_dir():
            if self._path.suffix in _PICKLES:
                raise CheckpointError(f"{self._path}: {_NO_PICKLES}")
            paths = [self._path]
        elif (single := self._path / "model.safetensors").exists():
            paths = [single]
        elif (index := self._path / "model.safetensors.index.json").exists():
            weight_map = _read_index(index)
            paths = [self._path / name for name in sorted(set(weight_map.values()))]
        else:
            raise CheckpointError(f"{self._path}: {_why_no_weights(self._path)}")
        for shard in paths:
            self._add(shard)
        for name, shard_name in weight_map.items():
            if name not in self._where or self._where[name].path.name != shard_name:
                raise CheckpointError(
                    f"{self._path / shard_name}: tensor {name!r}: not in this file, where {index} says it is"
                )
        for name, file in self._where.items():
            if weight_map and name not in weight_map:
                raise file.error(f"is in this file, but {index} does not name it", name)

    def _add(self, path: Path) -> None:
        file = DataFile(path)
        self._files.append(file)
        found, declaration = _parse_header(file)
        for name in found:
            if name in self._where:
                raise file.error(f"is in {self._where[name].path} too", name)
            self._where[name] = file
        self._blocks |= take_blocks(file, found, declaration)
        self._stored |= found

    def read(self, name: str, rows: Span, columns: Span | None = None) -> Array:
        """See Checkpoint.read."""
        if name in self._blocks:
            return self._blocks[name].read_values(rows, columns)
        if name not in self._stored:
            raise CheckpointError(f"{self._path}: tensor {name!r} is not in this checkpoint")
        return self._read(name, READABLE, rows, columns)

    def read_whole(self, name: str) -> Array:
        """A small tensor of any shape, one without dimensions too."""
        info = self._stored[name].info
        flat = self._stored[name]._replace(info=info._replace(shape=(math.prod(info.shape),)))
        return flat.read(name, READABLE, Span(0, math.prod(info.shape)), None).reshape(info.shape)

    def read_fp8(self, name: str, rows: Span, columns: Span | None = None) -> Array:
        """As `read`, for a tensor of eight-bit floats, which are nothing without their scale."""
        return self._read(name, FP8, rows, columns)

    def _read(self, name: str, dtypes: Mapping[str, np.dtype[Any]], rows: Span, columns: Span | None) -> Array:
        values = self._stored[name].read(name, dtypes, rows, columns)
        if name in self._copies:
            head, copy = self._copies[name]
            bits = f"u{values.dtype.itemsize}"
            if not np.array_equal(copy.read(head, dtypes, rows, columns).view(bits), values.view(bits)):
                raise copy.file.error(f"is not equal to {name}: {_NOT_TIED}", head)
        return values

    def _tie(self, embedding: str, head: str) -> None:
        if head not in self._stored or embedding in self._blocks:
            return
        stored = self._stored.pop(head)
        own = self._stored.setdefault(embedding, stored)
        if (own.info.shape, own.info.format) != (stored.info.shape, stored.info.format):
            raise stored.file.error(f"is not {embedding}, {own.info.format} {list(own.info.shape)}: {_NOT_TIED}", head)
        if own is not stored:
            self._copies[embedding] = head, stored

    def read_blocks(self, name: str, rows: Span, columns: Span | None, method: Method) -> QuantizedRows | None:
        """See Checkpoint.read_blocks."""
        blocks = self._blocks.get(name)
        return blocks.read(rows, columns) if blocks and blocks.info.method is method else None

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._files)

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            file.close()


_NOT_TIED = "config.json says that they are one matrix; if they are two, set tie_word_embeddings to false there"
_NO_PICKLES = "pickles (.bin, .pt, .pth) are never read, since loading one can run any code; convert to safetensors"


def _why_no_weights(directory: Path) -> str:
    files = sorted(p.name for p in directory.iterdir())
    found = [name for name in files if name.endswith((".safetensors", ".gguf"))]
    if found:
        return f"no model.safetensors(.index.json) here, but {', '.join(found[:4])}: give a file itself"
    if any(name.endswith(_PICKLES) for name in files):
        return _NO_PICKLES
    return "no weights here: neither model.safetensors nor model.safetensors.index.json"


def _parse_json(raw: bytes) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise ValueError(f"{key!r} appears twice")
            result[key] = value
        return result

    try:
        return json.loads(raw, object_pairs_hook=unique)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _read_index(path: Path) -> dict[str, str]:
    """The weight map of an index: tensor name -> name of a file in the same directory."""
    try:
        index = _parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path}: tensor {name!r}: {file!r} is not the name of a file")
        if not (path.parent / file).is_file():
            raise CheckpointError(f"{path}: tensor {name!r}: its file {path.parent / file} does not exist")
    return weight_map


def _parse_header(file: DataFile) -> tuple[dict[str, Stored], Any]:
    """The tensors of one file, and what it declares of quantized ones.

    A file is 8 bytes of header length (little-endian), the header (JSON), the data.
    """
    if file.size < 8:
        raise file.error(f"truncated: {file.size} bytes do not hold the length of a header")
    length = int.from_bytes(file.read_bytes(0, 8), "little")
    if length > min(MAX_HEADER, file.size - 8):
        raise file.error(
            f"a header of {length} bytes in a file of {file.size} (at most {MAX_HEADER}): truncated, or not safetensors"
        )
    try:
        header = _parse_json(file.read_bytes(8, length))
    except ValueError as error:
        raise file.error(f"the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise file.error("the header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    stored = {name: _parse_tensor(file, name, entry, 8 + length) for name, entry in header.items()}
    check_extents(file, [(name, s.offset, s.nbytes) for name, s in stored.items()])
    used = sum(s.nbytes for s in stored.values())
    if 8 + length + used != file.size:
        raise file.error(f"{file.size - 8 - length - used} bytes of data belong to no tensor")
    return stored, metadata.get(DECLARATION) if isinstance(metadata, dict) else None


def _parse_tensor(file: DataFile, name: str, entry: Any, data: int) -> Stored:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise file.error("its header lacks dtype, shape or data_offsets", name)
    # A zero among the dimensions does not make the others harmless: NumPy multiplies them all the same.
    sizes = [max(n, 1) if type(n) is int and n >= 0 else MAX_ELEMENTS for n in shape]
    if len(shape) > MAX_DIMENSIONS or math.prod(sizes) >= MAX_ELEMENTS:
        raise file.error(f"impossible shape {str(shape)[:100]}", name)
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise file.error(f"impossible data_offsets {[begin, end]}", name)
    if data + end > file.size:
        raise file.error(f"truncated: its data ends at byte {data + end} of a file of {file.size}", name)
    if dtype in _BITS and 8 * (end - begin) != math.prod(shape) * _BITS[dtype]:
        raise file.error(f"{end - begin} bytes of data do not make {dtype} {shape}", name)
    return Stored(TensorInfo(tuple(shape), dtype, str(file.path)), file, data + begin, end - begin)
