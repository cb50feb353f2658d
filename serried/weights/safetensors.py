"""Checkpoints in the safetensors format: read by the slice, written as a stream."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serried.errors import CheckpointError
from serried.parallel.reduction import Span
from serried.weights.checkpoint import Array, TensorInfo
from serried.weights.files import READABLE, DataFile, check_extents

MAX_HEADER = 100_000_000
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 56

# Bits of an element, to check the extents of tensors that are listed but cannot be read too.
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4}
_BITS |= {"U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64}
_BITS |= {name: 8 * dtype.itemsize for name, dtype in READABLE.items()}

_PICKLES = (".bin", ".pt", ".pth")


class _Stored(NamedTuple):
    info: TensorInfo
    file: DataFile
    offset: int
    nbytes: int


class SafetensorsCheckpoint:
    """A .safetensors file, or a directory with model.safetensors or with an index and its shards.

    F32, F16 and BF16 can be read; tensors of other dtypes are listed. Raises CheckpointError where anything
    is missing, damaged or said twice.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._files: list[DataFile] = []
        self._stored: dict[str, _Stored] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = {name: s.info for name, s in self._stored.items()}

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
            if name not in self._stored or self._stored[name].file.path.name != shard_name:
                raise CheckpointError(
                    f"{self._path / shard_name}: tensor {name!r}: not in this file, where {index} says it is"
                )

    def _add(self, path: Path) -> None:
        file = DataFile(path)
        self._files.append(file)
        for name, stored in _parse_header(file).items():
            if name in self._stored:
                raise file.error(f"is in {self._stored[name].file.path} too", name)
            self._stored[name] = stored

    def read(self, name: str, rows: Span, columns: Span | None = None) -> Array:
        """See Checkpoint.read."""
        if name not in self._stored:
            raise CheckpointError(f"{self._path}: tensor {name!r} is not in this checkpoint")
        info, file, offset, _ = self._stored[name]
        if info.format not in READABLE:
            raise file.error(f"dtype {info.format} cannot be read; convert it to {', '.join(READABLE)}", name)
        return file.read_plain(name, info, offset, READABLE[info.format], rows, columns)

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._files)

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            file.close()


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


def _parse_header(file: DataFile) -> dict[str, _Stored]:
    """The tensors of one file: 8 bytes of header length (little-endian), the header (JSON), the data."""
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
    header.pop("__metadata__", None)
    stored = {name: _parse_tensor(file, name, entry, 8 + length) for name, entry in header.items()}
    check_extents(file, [(name, s.offset, s.nbytes) for name, s in stored.items()])
    used = sum(s.nbytes for s in stored.values())
    if 8 + length + used != file.size:
        raise file.error(f"{file.size - 8 - length - used} bytes of data belong to no tensor")
    return stored


def _parse_tensor(file: DataFile, name: str, entry: Any, data: int) -> _Stored:
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
    return _Stored(TensorInfo(tuple(shape), dtype, str(file.path)), file, data + begin, end - begin)


class TensorSource(NamedTuple):
    """A tensor to be written: `chunks` makes its elements, in order, as arrays of the dtype, any shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Array]]


def write_safetensors(path: str | Path, tensors: Iterable[TensorSource], **metadata: str) -> None:
    """Write a file, one chunk in memory at a time; it gets its name when it is complete.

    dtypes: F32, F16, BF16. Raises ValueError where the chunks do not make their tensor.
    """
    path = Path(path)
    # Wide elements first, so that every tensor is aligned to its own element.
    sources = sorted(tensors, key=lambda t: -READABLE[t.dtype].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | metadata}
    end = 0
    for name, dtype, shape, _ in sources:
        begin, end = end, end + math.prod(shape) * READABLE[dtype].itemsize
        if name in header:
            raise ValueError(f"tensor {name!r} is given twice")
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            for source in sources:
                for chunk in _checked(source):
                    out.write(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _checked(source: TensorSource) -> Iterable[Array]:
    left = math.prod(source.shape)
    for chunk in source.chunks():
        left -= chunk.size
        if chunk.dtype != READABLE[source.dtype] or left < 0:
            raise ValueError(f"tensor {source.name!r}: a chunk {chunk.dtype} {chunk.shape} does not fit")
        yield chunk
    if left:
        raise ValueError(f"tensor {source.name!r}: {left} elements are missing")
