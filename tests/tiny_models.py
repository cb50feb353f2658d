"""Tiny random checkpoints, made on the fly by transformers: seeded, with every parameter random and logits that spread.

`SPECS` names them. `Models.model` gives transformers' own model, `Models.directory` the checkpoint that it saved (and
`Models.legacy` the same with RoPE spelt as before transformers 5), `Models.gguf` a GGUF file as llama.cpp's converter
makes it. All sizes are odd on purpose: what divides nicely hides mistakes.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
TEXT = [
    "the quick brown fox jumps over the lazy dog, and the dog did not mind at all",
    "serried ranks of soldiers stand close together; a rank holds a shard of the model",
    "one, two, three, four, five; once upon a time there was a model with ninety heads",
]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Spec:
    """A model: its family, and what differs from BASE. shard: max_shard_size. tokenizer: with text files."""

    family: str = "llama"
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    shard: str = "1GB"
    tokenizer: bool = False


def _heads(query: int, kv: int, head_dim: int, **more: Any) -> dict[str, Any]:
    return {"num_attention_heads": query, "num_key_value_heads": kv, "head_dim": head_dim, **more}


SPECS: dict[str, Spec] = {
    "llama-tied": Spec(config={"tie_word_embeddings": True}),
    "llama-untied": Spec(config={"vocab_size": 301, "intermediate_size": 173}),
    "llama-mha": Spec(config=_heads(5, 5, 20, hidden_size=72, vocab_size=257)),
    "llama-mqa": Spec(config=_heads(3, 1, 16)),
    "llama-wide": Spec(config=_heads(6, 3, 24, hidden_size=112)),
    "llama-narrow": Spec(config=_heads(6, 2, 20, hidden_size=448, intermediate_size=97)),
    "llama-rope3": Spec(config={"rope_parameters": LLAMA3}),
    "llama-theta": Spec(config={"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-biases": Spec(config={"attention_bias": True, "mlp_bias": True}),
    "llama-mlp-bias": Spec(config={"mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "llama-gelu": Spec(config={"hidden_act": "gelu", "intermediate_size": 33}),
    "llama-shards": Spec(shard="40KB"),
    "llama-bf16": Spec(dtype="bfloat16", config={"tie_word_embeddings": True}),
    "llama-uneven": Spec(config=_heads(9, 3, 32, hidden_size=96, intermediate_size=416, vocab_size=333)),
    "qwen3-uneven": Spec("qwen3", _heads(6, 2, 32, intermediate_size=300, vocab_size=329, tie_word_embeddings=True)),
    "qwen3-tied": Spec("qwen3", _heads(4, 2, 24, tie_word_embeddings=True)),
    "qwen3-untied": Spec("qwen3", _heads(6, 1, 16, vocab_size=333, intermediate_size=129)),
    "qwen3-mha": Spec("qwen3", _heads(3, 3, 32, hidden_size=80, rope_parameters=LLAMA3)),
    "qwen3-bias": Spec("qwen3", _heads(4, 4, 16, attention_bias=True)),
    # For splits: heads of 32 columns are units by themselves.
    "split-5": Spec(config=_heads(5, 5, 32, intermediate_size=40, vocab_size=100)),
    "split-9-3": Spec("qwen3", _heads(9, 3, 32, intermediate_size=600, tie_word_embeddings=True, vocab_size=449)),
    "split-4-1": Spec(config=_heads(4, 1, 32, attention_bias=True, mlp_bias=True, intermediate_size=300)),
    "split-text": Spec(config=_heads(4, 2, 32, tie_word_embeddings=True), tokenizer=True),
    # For GGUF: rows are whole blocks of 32.
    "gguf-llama": Spec(config=_heads(6, 2, 32, hidden_size=96, intermediate_size=224, vocab_size=300)),
    "gguf-rope3": Spec(config=_heads(4, 2, 16, rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "gguf-qwen3": Spec("qwen3", _heads(4, 2, 24, hidden_size=96, tie_word_embeddings=True)),
}


class Models:
    """The tiny models of one test session, made once each in a directory of their own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._models: dict[str, Any] = {}

    def model(self, name: str) -> Any:
        """transformers' model, in the dtype of its checkpoint."""
        if name not in self._models:
            self._models[name] = _build(name, SPECS[name])
        return self._models[name]

    def directory(self, name: str) -> Path:
        """The checkpoint as save_pretrained writes it."""
        path = self.root / name
        if not path.exists():
            self.model(name).save_pretrained(path, max_shard_size=SPECS[name].shard)
            if SPECS[name].tokenizer:
                write_tokenizer(path, SPECS[name].config.get("vocab_size", BASE["vocab_size"]))
        return path

    def copy(self, name: str, to: Path) -> Path:
        """A copy of a checkpoint, for a test that changes it."""
        return Path(shutil.copytree(self.directory(name), to / name))

    def legacy(self, name: str, key: str, to: Path) -> Path:
        """A copy whose config.json spells RoPE as before transformers 5, its kind under `key` (type, rope_type)."""
        path = self.copy(name, to)
        with edited_json(path / "config.json") as config:
            rope = config.pop("rope_parameters")
            config["rope_theta"] = rope.pop("rope_theta")
            kind = rope.pop("rope_type")
            config["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
        return path

    def gguf(self, name: str, kind: str = "F32") -> Path:
        """A GGUF file, with its matrices in a type of block (F32, F16, Q8_0)."""
        path = self.root / f"{name}-{kind}.gguf"
        if not path.exists():
            _write_gguf(path, self.model(name), SPECS[name], kind)
        return path


@contextmanager
def edited_json(path: Path) -> Iterator[dict[str, Any]]:
    """A JSON file's object, to be changed in place; then it is written back."""
    value = json.loads(path.read_text())
    yield value
    path.write_text(json.dumps(value))


def _build(name: str, spec: Spec) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    make_config, make_model = kinds[spec.family]
    # transformers refuses to make a Llama whose hidden size its heads do not divide, but runs the ones that exist.
    LlamaConfig.__class_validators__ = [v for v in LlamaConfig.__class_validators__ if "architecture" not in v.__name__]
    torch.manual_seed(zlib.crc32(name.encode()))  # of its own: a model more or less changes no other
    model = make_model(make_config(**{**BASE, **spec.config}))
    with torch.no_grad():
        for key, value in model.named_parameters():
            _fill(key, value)
    return in_dtype(model, spec.dtype)


def in_dtype(model: Any, dtype: str) -> Any:
    """A copy of a model with its parameters in a dtype; RoPE's frequencies stay float32 (`.to` would round them)."""
    import torch

    model = copy.deepcopy(model).eval()
    for value in model.parameters():
        value.data = value.data.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    return model


def _fill(name: str, value: Any) -> None:
    """Random biases and norms too (transformers would leave them 0 and 1), and matrices that keep the scale."""
    if value.ndim == 1:
        value.normal_(0.0, 0.25)
        if "norm" in name:
            value.add_(1.0)
    else:
        value.normal_(0.0, value.shape[1] ** -0.5)


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer of at most so many tokens, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "chat_template": CHAT}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[module]}.{kind}"


def _permuted(weight: Any, heads: int) -> Any:
    """The rows of q or k as convert_hf_to_gguf.py orders them for the Llama architecture."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _write_gguf(path: Path, model: Any, spec: Spec, kind: str) -> None:
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, spec.family)
    _write_metadata(writer, config)
    factors = rope_factors(model)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if spec.family == "llama" and ("q_proj" in name or "k_proj" in name):
            values = _permuted(values, config.num_attention_heads if "q_" in name else config.num_key_value_heads)
        stored = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(0)
    _write_vocabulary(writer, config.vocab_size)


def _write_vocabulary(writer: Any, size: int) -> None:
    """The 256 bytes, one merge, and unused tokens up to the size."""
    from tokenizers import pre_tokenizers

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens.append(tokens[0] + tokens[1])
    spare = [f"[PAD{i}]" for i in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *spare])
    writer.add_token_types([1] * len(tokens) + [5] * len(spare))
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_eos_token_id(2)


def rope_factors(model: Any) -> Any:
    """What llama.cpp divides each RoPE frequency by, as transformers scales them; None where it does not."""
    rope = model.config.rope_parameters
    if rope["rope_type"] == "default":
        return None
    dim = model.config.head_dim
    plain = rope["rope_theta"] ** -(np.arange(0, dim, 2, dtype=np.float32) / dim)
    return (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
