"""A model with dummy weights as a GGUF file, for benchmarks that compare with programs that read no other."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serried.errors import InputError
from serried.models.config import ModelConfig
from serried.models.decoder import Decoder
from serried.parallel.comm import LocalComm
from serried.parallel.reduction import Span
from serried.weights.checkpoint import Array
from serried.weights.dummy import DummyCheckpoint
from serried.weights.load import tensor_shapes

TYPES = ("BF16", "Q8_0", "Q4_0", "Q4_1")
WIDE = (
    "Q8_0"  # of embedding and LM head in the 4-bit files: llama.cpp's quantizer takes Q6_K, which `gguf` cannot write
)
WRITTEN = ("llama", "qwen3")  # families whose GGUF files have no metadata of their own
ROWS = 4096  # made and quantized at once

Report = Callable[[int, int], None]  # (elements done, elements in all)


def write_dummy_gguf(path: Path, config: ModelConfig, name: str, kind: str, seed: int, report: Report | None) -> None:
    """Write a model's dummy weights: matrices in a type of GGML, the rest in float32. No tokenizer (`no_vocab`).

    name: the model's. kind: one of TYPES. The file gets its name when it is complete. InputError says what the format
    or the file system does not allow.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write(temporary, config, name, kind, seed, report)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None


def _write(path: Path, config: ModelConfig, model: str, kind: str, seed: int, report: Report | None) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    shapes = _shapes(config)
    kinds = {name: _kind_of(name, shape, kind, config) for name, shape in shapes.items()}
    writer = GGUFWriter(path, _architecture(config))
    try:
        _add_metadata(writer, config, model, kind)
        for name, own in _gguf_names(config, shapes).items():
            # The writer takes the shape of the bytes.
            stored = (*shapes[name][:-1], _row_bytes(name, shapes[name][-1], kinds[name]))
            raw = GGMLQuantizationType[kinds[name]]
            writer.add_tensor_info(own, stored, np.dtype(np.uint8), math.prod(stored), raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        checkpoint = DummyCheckpoint(shapes, seed)
        done, total = 0, sum(math.prod(shape) for shape in shapes.values())
        for name, shape in shapes.items():
            writer.write_tensor_data(_stored(checkpoint, config, name, kinds[name]))
            done += math.prod(shape)
            if report:
                report(done, total)
    finally:
        writer.close()


def _shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    model = Decoder(config, config.partition((1,)), LocalComm(), max_positions=1)
    return tensor_shapes(model.parameters())


def _architecture(config: ModelConfig) -> str:
    if config.family.name not in WRITTEN:
        raise InputError(
            f"dummy weights are written as GGUF for {' and '.join(WRITTEN)} models, not for {config.family.name}; "
            "give a .gguf file"
        )
    if config.rope.kind != "default":
        raise InputError(f"a GGUF file of dummy weights cannot say RoPE scaling of kind {config.rope.kind!r}")
    return config.family.gguf_architectures[0]


def _add_metadata(writer: Any, config: ModelConfig, model: str, kind: str) -> None:
    from gguf import LlamaFileType

    writer.add_name(f"{model}, dummy weights")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_tokenizer_model("no_vocab")  # token ids alone: llama.cpp takes their number from vocab_size


def _gguf_names(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The name of each tensor in the file."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH[_architecture(config).upper()], config.num_layers)
    own = {name: names.get_name(name, (".weight", ".bias")) for name in shapes}
    return {name: str(each) for name, each in own.items()}


def _kind_of(name: str, shape: tuple[int, ...], kind: str, config: ModelConfig) -> str:
    """The type of a tensor: vectors stay float32, embedding and LM head of a 4-bit file are wider."""
    if len(shape) == 1:
        return "F32"
    ends = (config.family.names.embedding, config.family.names.lm_head)
    return WIDE if kind.startswith("Q4") and name.startswith(ends) else kind


def _row_bytes(name: str, columns: int, kind: str) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if columns % elements:
        raise InputError(f"{name}: rows of {columns} are not made of whole blocks of {elements}, as {kind} needs")
    return int(columns // elements * nbytes)


def _stored(checkpoint: DummyCheckpoint, config: ModelConfig, name: str, kind: str) -> npt.NDArray[np.uint8]:
    """A tensor's bytes as the file holds them: [rows, bytes], or [bytes] of a vector."""
    shape = checkpoint.tensors[name].shape
    if len(shape) == 1:
        return _encode(checkpoint.read(name, Span(0, shape[0])), kind)
    out = np.empty((shape[0], _row_bytes(name, shape[1], kind)), np.uint8)
    head = _interleaved_rows(config, name)
    step = max(1, ROWS // head) * head
    for start in range(0, shape[0], step):
        rows = Span(start, min(start + step, shape[0]))
        values = checkpoint.read(name, rows)
        if head > 1:
            values = values.reshape(-1, 2, head // 2, shape[1]).swapaxes(1, 2).reshape(rows.size, -1)
        out[rows.start : rows.stop] = _encode(values, kind)
    return out


def _interleaved_rows(config: ModelConfig, name: str) -> int:
    """The rows of a head of Q or K in a file of the architecture `llama`, which interleaves a head's halves; else 1."""
    names = config.family.names
    permuted = _architecture(config) == "llama" and name.endswith((f"{names.q_proj}.weight", f"{names.k_proj}.weight"))
    return config.head_dim if permuted else 1


def _encode(values: Array, kind: str) -> npt.NDArray[np.uint8]:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    if kind == "BF16":
        return np.ascontiguousarray(values).view(np.uint8)
    wide = np.ascontiguousarray(values, np.float32)
    if kind == "F32":
        return wide.view(np.uint8)
    blocks: npt.NDArray[np.uint8] = quantize(wide, GGMLQuantizationType[kind])
    return blocks
