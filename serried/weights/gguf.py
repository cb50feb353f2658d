"""Checkpoints in GGUF files: tensors read by the slice, under their Hugging Face names, dequantized."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from serried.parallel.reduction import Span
from serried.weights.checkpoint import Array, TensorInfo
from serried.weights.files import READABLE, slice_shape
from serried.weights.gguf_blocks import dequantize
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
