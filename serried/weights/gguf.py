"""Checkpoints in GGUF files: tensors read by the slice, under their Hugging Face names, as numbers or as blocks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from serried.parallel.reduction import Span
from serried.quant.method import GROUP, Bytes, Method
from serried.quant.registry import method_of_ggml
from serried.quant.rows import QuantizedRows
from serried.weights.checkpoint import Array, TensorInfo
from serried.weights.files import READABLE, slice_shape
from serried.weights.gguf_blocks import as_blocks, can_dequantize, dequantize, keeps
from serried.weights.gguf_file import GGUFFile, GGUFTensor

# Elements dequantized at a time: 1 MiB of float32, so that the temporaries stay in a cache.
PIECE = 1 << 18

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


def hf_name(gguf_name: str, own: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """The Hugging Face name of a tensor of a decoder in the style of Llama and Qwen; None for any other.

    own: names of modules in a layer that are the family's own.
    """
    match = _NAME.fullmatch(gguf_name)
    if match is None:
        return None
    layer, module, kind = match["layer"], match["module"], match["kind"]
    name = _TOP.get(module) if layer is None else own.get(module) or _LAYER.get(module)
    if name is None:
        return None
    return f"{name}.{kind}" if layer is None else f"model.layers.{layer}.{name}.{kind}"


class _Entry(NamedTuple):
    gguf_name: str
    tensor: GGUFTensor
    head: int  # rows of a head whose halves are interleaved; 0 where none are


class GGUFCheckpoint:
    """The tensors of a GGUF file (or of all files of a split one) under the names that `names` gives them.

    A tensor that `names` does not know keeps its own name, so that the loader complains of it. `extras` lists
    what belongs to no parameter (frequencies of RoPE), under its own name; it is read in the same way. The
    checkpoint owns the files.
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
                raise tensor.file.error(f"is {name!r}, and so is {self._entries[name].gguf_name!r}", own)
            self._entries[name] = _Entry(own, tensor, _interleaved(file, own, tensor))
            target = extras if name == own and _is_extra(own) else tensors
            target[name] = _info(tensor)
        self.tensors: Mapping[str, TensorInfo] = tensors
        self.extras: Mapping[str, TensorInfo] = extras

    def read(self, name: str, rows: Span, columns: Span | None = None) -> Array:
        """See Checkpoint.read."""
        own, tensor, head = entry = self._entry(name)
        file, info = tensor.file, _info(tensor)
        if not can_dequantize(tensor.type):
            raise file.error(f"type {info.format} cannot be dequantized", own)
        plain = READABLE.get(info.format)
        if plain is not None and not head:
            return file.read_plain(own, info, tensor.offset, plain, rows, columns)
        shape = slice_shape(own, info, rows, columns)
        # A matrix of all rows of the last dimension; of a vector, each element is a row.
        lines = math.prod(tensor.shape[1:-1])
        columns = columns or Span(0, math.prod(tensor.shape[1:]) // lines)
        out = np.empty((rows.size * lines, columns.size), np.float32 if plain is None else plain)
        if out.size:
            step = max(1, PIECE // max(1, columns.size))
            _gather(entry, Span(rows.start * lines, rows.stop * lines), step, out, _values(entry, columns))
        return out.reshape(shape)

    def read_blocks(self, name: str, rows: Span, columns: Span | None, method: Method) -> QuantizedRows | None:
        """See Checkpoint.read_blocks."""
        own, tensor, _ = entry = self._entry(name)
        if len(tensor.shape) != 2 or not keeps(tensor.type, method):
            return None
        slice_shape(own, _info(tensor), rows, columns)
        columns = columns or Span(0, tensor.shape[1])
        if columns.start % GROUP:
            return None
        out = np.empty((rows.size, method.row_bytes(columns.size)), np.uint8)
        if out.size:
            _gather(entry, rows, rows.size, out, _blocks(entry, columns, method))
        return QuantizedRows(method, columns.size, out)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise self._file.data.error("is not in this checkpoint", name)
        return self._entries[name]

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._file.files)

    def close(self) -> None:
        """Close the files."""
        self._file.close()


def _info(tensor: GGUFTensor) -> TensorInfo:
    kind = tensor.type
    method = method_of_ggml(kind.name) if kind.elements > 1 else None
    return TensorInfo(tensor.shape, kind.name, str(tensor.file.path), method)


def _gather(entry: _Entry, rows: Span, step: int, out: Array, stored: Callable[[Span], Array]) -> None:
    """Fill `out` with rows that `stored` gives in the order of the file, about `step` at a time.

    Whole heads at a time where their rows are interleaved.
    """
    unit = entry.head or 1
    step = max(1, step // unit) * unit
    for start in range(rows.start // unit * unit, rows.stop, step):
        part = Span(start, min(start + step, -(-rows.stop // unit) * unit))
        values = stored(part)
        if entry.head:
            values = values.reshape(-1, unit // 2, 2, out.shape[1]).swapaxes(1, 2).reshape(part.size, -1)
        low, high = max(start, rows.start), min(part.stop, rows.stop)
        out[low - rows.start : high - rows.start] = values[low - start : high - start]


def _values(entry: _Entry, columns: Span) -> Callable[[Span], Array]:
    """A reader of rows [rows, columns] as numbers."""
    kind = entry.tensor.type

    def read(rows: Span) -> Array:
        raw, blocks = _raw(entry, rows, columns)
        return dequantize(raw, kind)[:, columns.start - blocks.start * kind.elements :][:, : columns.size]

    return read


def _blocks(entry: _Entry, columns: Span, method: Method) -> Callable[[Span], Array]:
    """A reader of rows [rows, row_bytes] as blocks of a method."""
    kind = entry.tensor.type

    def read(rows: Span) -> Array:
        raw, blocks = _raw(entry, rows, columns)
        first = method.row_bytes(columns.start - blocks.start * kind.elements)
        return as_blocks(raw, kind)[:, first : first + method.row_bytes(columns.size)]

    return read


def _raw(entry: _Entry, rows: Span, columns: Span) -> tuple[Bytes, Span]:
    """The blocks that cover some columns of rows of the last dimension, and which blocks these are."""
    own, tensor, _ = entry
    kind = tensor.type
    row = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    if row % kind.elements:
        raise tensor.file.error(f"a vector in blocks of {kind.name} cannot be read", own)
    blocks = Span(columns.start // kind.elements, -(-columns.stop // kind.elements))
    stride = row // kind.elements * kind.nbytes
    offset = tensor.offset + rows.start * stride + blocks.start * kind.nbytes
    return tensor.file.read_matrix(own, offset, stride, (rows.size, blocks.size * kind.nbytes)), blocks


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
        raise tensor.file.error(f"shape {list(tensor.shape)} is not {heads!r} heads of an even size", gguf_name)
    return rows // heads
