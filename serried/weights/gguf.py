"""Checkpoints in GGUF files: the container is parsed here, tensors are read by the slice."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from serried.errors import CheckpointError
from serried.parallel.reduction import Span
from serried.weights.checkpoint import Array, TensorInfo
from serried.weights.safetensors import READABLE, DataFile, check_extents, slice_shape

_Bytes = npt.NDArray[np.uint8]

# Elements dequantized at a time: 1 MiB of float32, so that the temporaries stay in a cache.
PIECE = 1 << 18
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
            raise self._error(
                "big-endian GGUF files cannot be read; convert the model to a little-endian one"
            )
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
                raise self._file.error(
                    f"truncated: its data ends at byte {end} of a file of {self._file.size}", name
                )
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


_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>0|[1-9][0-9]*)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)", re.ASCII)


def hf_name(gguf_name: str) -> str | None:
    """The Hugging Face name of a tensor of a decoder in the style of Llama and Qwen; None for any other."""
    match = _NAME.fullmatch(gguf_name)
    if match is None:
        return None
    layer, module, kind = match["layer"], match["module"], match["kind"]
    name = (_TOP if layer is None else _LAYER).get(module)
    if name is None:
        return None
    return f"{name}.{kind}" if layer is None else f"model.layers.{layer}.{name}.{kind}"


class _Entry(NamedTuple):
    gguf_name: str
    tensor: GGUFTensor
    head: int  # rows of a head whose halves are interleaved; 0 where none are


class GGUFCheckpoint:
    """The tensors of a GGUF file under the names that `names` gives them.

    A tensor that `names` does not know keeps its own name, so that the loader complains of it. `extras` lists
    what belongs to no parameter (frequencies of RoPE), under its own name; it is read in the same way. The
    checkpoint owns the file.
    """

    def __init__(self, file: GGUFFile, names: Mapping[str, str] | Callable[[str], str | None]) -> None:
        self._file = file
        self._entries: dict[str, _Entry] = {}
        tensors: dict[str, TensorInfo] = {}
        extras: dict[str, TensorInfo] = {}
        lookup = names.get if isinstance(names, Mapping) else names
        for own, tensor in file.tensors.items():
            name = lookup(own) or own
            if name in self._entries:
                raise file.data.error(f"is {name!r}, and so is {self._entries[name].gguf_name!r}", own)
            self._entries[name] = _Entry(own, tensor, _interleaved(file, own, tensor))
            target = extras if name == own and _is_extra(own) else tensors
            target[name] = TensorInfo(tensor.shape, tensor.type.name, str(file.data.path))
        self.tensors: Mapping[str, TensorInfo] = tensors
        self.extras: Mapping[str, TensorInfo] = extras

    def read(self, name: str, rows: Span, columns: Span | None = None) -> Array:
        """See Checkpoint.read."""
        file = self._file.data
        if name not in self._entries:
            raise file.error("is not in this checkpoint", name)
        own, tensor, head = self._entries[name]
        info = TensorInfo(tensor.shape, tensor.type.name, str(file.path))
        plain = READABLE.get(tensor.type.name)
        if plain is not None and not head:
            return file.read_plain(own, info, tensor.offset, plain, rows, columns)
        shape = slice_shape(own, info, rows, columns)
        # A matrix of all rows of the last dimension; of a vector, each element is a row.
        lines = math.prod(tensor.shape[1:-1])
        first, last = rows.start * lines, rows.stop * lines
        columns = columns or Span(0, math.prod(tensor.shape[1:]) // lines)
        out = np.empty((last - first, columns.size), np.float32 if plain is None else plain)
        if not out.size:
            return out.reshape(shape)
        # Whole heads at a time: their rows are interleaved.
        unit = head or 1
        step = max(1, PIECE // max(1, columns.size) // unit) * unit
        for start in range(first // unit * unit, last, step):
            part = Span(start, min(start + step, -(-last // unit) * unit))
            values = self._stored(own, tensor, part, columns)
            if head:
                values = values.reshape(-1, head // 2, 2, columns.size).swapaxes(1, 2).reshape(part.size, -1)
            low, high = max(start, first), min(part.stop, last)
            out[low - first : high - first] = values[low - start : high - start]
        return out.reshape(shape)

    def _stored(self, own: str, tensor: GGUFTensor, rows: Span, columns: Span) -> Array:
        """Rows of the last dimension in the order of the file, [rows, columns]: reads the covering blocks."""
        kind = tensor.type
        row = tensor.shape[-1] if len(tensor.shape) > 1 else 1
        if row % kind.elements:
            raise self._file.data.error(f"a vector in blocks of {kind.name} cannot be read", own)
        blocks = Span(columns.start // kind.elements, -(-columns.stop // kind.elements))
        stride = row // kind.elements * kind.nbytes
        offset = tensor.offset + rows.start * stride + blocks.start * kind.nbytes
        raw = self._file.data.read_matrix(own, offset, stride, (rows.size, blocks.size * kind.nbytes))
        try:
            values = dequantize(raw, kind)
        except NotImplementedError as error:
            raise self._file.data.error(f"type {kind.name} cannot be dequantized", own) from error
        return values[:, columns.start - blocks.start * kind.elements :][:, : columns.size]

    @property
    def bytes_read(self) -> int:
        return self._file.data.bytes_read

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_extra(gguf_name: str) -> bool:
    return "rope_freqs" in gguf_name or "rope_factors" in gguf_name


def _interleaved(file: GGUFFile, gguf_name: str, tensor: GGUFTensor) -> int:
    """The rows of a head of Q or K, where the architecture stores the two halves of a head interleaved.

    To models of the architecture "llama", and to no others that are served here, the converter does
    weights.reshape(heads, 2, head // 2, ...).swapaxes(1, 2).
    """
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", gguf_name)
    if match is None or file.metadata.get("general.architecture") != "llama":
        return 0
    heads = file.metadata.get("llama.attention.head_count")
    if match[1] == "k":
        heads = file.metadata.get("llama.attention.head_count_kv", heads)
    rows = tensor.shape[0]
    if type(heads) is not int or heads < 1 or rows % (2 * heads) or len(tensor.shape) > 2:
        raise file.data.error(f"shape {list(tensor.shape)} is not {heads!r} heads of an even size", gguf_name)
    return rows // heads


def dequantize(raw: _Bytes, kind: BlockType) -> Array:
    """Bytes [rows, blocks] to float32 (or to the plain type that they are), [rows, elements].

    The frequent simple types are done here, several times as fast as by the library and to the same bits.
    Raises NotImplementedError for types that the library cannot do.
    """
    if kind.name in READABLE:
        return raw.view(READABLE[kind.name])
    if kind.name not in _FAST:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as dequantize_any

        if kind.name not in GGMLQuantizationType.__members__:
            raise NotImplementedError(kind.name)
        values: Array = dequantize_any(raw, GGMLQuantizationType[kind.name])
        return values
    return _FAST[kind.name](raw.reshape(-1, kind.nbytes)).reshape(raw.shape[0], -1)


def _halves(blocks: _Bytes, at: int) -> npt.NDArray[np.float32]:
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: _Bytes) -> _Bytes:
    """The low halves of 16 bytes, then the high halves: [blocks, 32]."""
    out = np.empty((packed.shape[0], 32), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, :16])
    np.right_shift(packed, 4, out=out[:, 16:])
    return out


def _q4_0(blocks: _Bytes) -> npt.NDArray[np.float32]:
    signed = _nibbles(blocks[:, 2:])
    signed -= 8
    return signed.view(np.int8) * _halves(blocks, 0)


def _q4_1(blocks: _Bytes) -> npt.NDArray[np.float32]:
    values = _nibbles(blocks[:, 4:]) * _halves(blocks, 0)
    values += _halves(blocks, 2)
    return values


def _q8_0(blocks: _Bytes) -> npt.NDArray[np.float32]:
    return blocks[:, 2:].view(np.int8) * _halves(blocks, 0)


_FAST: Mapping[str, Callable[[_Bytes], npt.NDArray[np.float32]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
}
