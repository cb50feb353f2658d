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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_gguf import write_gguf

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
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LOCAL = {  # Gemma 3: layers that see everything, and layers with a window
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}


def longrope(pairs: int, **more: Any) -> dict[str, Any]:
    """Phi-3's RoPE, each pair of columns with factors of its own."""
    short = [1.0 + 0.05 * i for i in range(pairs)]
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": short,
        "long_factor": [2.0 + 3 * factor for factor in short],
        **more,
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


CLASSES = {  # of transformers, by family
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3Text",
    "phi3": "Phi3",
}


def _heads(query: int, kv: int, head_dim: int, **more: Any) -> dict[str, Any]:
    return {"num_attention_heads": query, "num_key_value_heads": kv, "head_dim": head_dim, **more}


_GEMMA2 = {  # caps that bite
    "num_hidden_layers": 3,
    "sliding_window": 7,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
_GEMMA3 = {
    "num_hidden_layers": 4,
    "sliding_window": 6,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 30,
}
_CAPPED = {"final_logit_softcapping": 3.0}
_LONGROPE = _heads(
    *(4, 2, 32), hidden_size=128, max_position_embeddings=256, original_max_position_embeddings=64, vocab_size=299
)

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
    "llama-linear": Spec(config={"rope_parameters": LINEAR}),
    "llama-yarn": Spec(config={"rope_parameters": YARN}),
    "llama-yarn-edges": Spec(
        config=_heads(
            *(3, 1, 32), rope_parameters={**YARN, "beta_fast": 20, "beta_slow": 0.3, "mscale": 0.7, "truncate": False}
        )
    ),
    "llama-yarn-scales": Spec(config={"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    "llama-yarn-factor": Spec(config={"rope_parameters": {**YARN, "attention_factor": 1.1}}),
    "mistral-window": Spec("mistral", _heads(6, 3, 24, sliding_window=9)),
    "mistral-whole": Spec("mistral", {"sliding_window": None, "rope_parameters": LINEAR, "intermediate_size": 97}),
    "qwen2": Spec("qwen2", _heads(7, 1, 16, vocab_size=257)),
    "qwen2-window": Spec(
        "qwen2",
        _heads(4, 4, 16, use_sliding_window=True, sliding_window=11, max_window_layers=1, rope_parameters=YARN),
    ),
    "qwen3-window": Spec(
        "qwen3",
        _heads(
            *(4, 2, 24), use_sliding_window=True, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
        ),
    ),
    "gemma2": Spec("gemma2", {**_GEMMA2, **_heads(6, 2, 20, vocab_size=301, hidden_size=72)}),
    "gemma2-bias": Spec("gemma2", {**_GEMMA2, "attention_bias": True, "final_logit_softcapping": None}),
    "gemma3": Spec("gemma3", {**_GEMMA3, **_heads(4, 1, 32, rope_parameters=LOCAL), **_CAPPED}),
    "gemma3-default": Spec("gemma3", {**_GEMMA3, **_heads(6, 3, 24), "attn_logit_softcapping": 0.1}),
    "gemma3-untied": Spec("gemma3", {**_GEMMA3, "tie_word_embeddings": False, "vocab_size": 299}),
    "phi3": Spec("phi3", _heads(6, 2, 16, sliding_window=13, vocab_size=299)),
    "phi3-partial": Spec("phi3", _heads(3, 3, 32, partial_rotary_factor=0.75, tie_word_embeddings=True)),
    # Of these RoPE depends on the longest sequence.
    "longest-dynamic": Spec(config={"rope_parameters": DYNAMIC, "max_position_embeddings": 64}),
    "longest-phi3": Spec("phi3", {**_LONGROPE, "rope_parameters": longrope(16)}),
    "longest-phi3-partial": Spec(
        "phi3",
        {**_LONGROPE, "rope_parameters": longrope(12, attention_factor=1.2), "partial_rotary_factor": 0.75},
    ),
    # For splits: heads of 32 columns are units by themselves.
    "split-5": Spec(config=_heads(5, 5, 32, intermediate_size=40, vocab_size=100)),
    "split-9-3": Spec("qwen3", _heads(9, 3, 32, intermediate_size=600, tie_word_embeddings=True, vocab_size=449)),
    "split-4-1": Spec(config=_heads(4, 1, 32, attention_bias=True, mlp_bias=True, intermediate_size=300)),
    "split-mistral": Spec("mistral", _heads(8, 8, 32, sliding_window=9, vocab_size=32001, intermediate_size=417)),
    "split-qwen2": Spec("qwen2", _heads(7, 7, 32, vocab_size=151665, intermediate_size=353)),
    "split-qwen3": Spec(
        "qwen3",
        _heads(
            *(6, 6, 32),
            use_sliding_window=True,
            sliding_window=11,
            max_window_layers=1,
            vocab_size=49159,
            intermediate_size=161,
            tie_word_embeddings=True,
        ),
    ),
    "split-gemma2": Spec("gemma2", {**_GEMMA2, **_heads(8, 4, 32, vocab_size=32001, intermediate_size=225)}),
    "split-gemma3": Spec(
        "gemma3",
        {**_GEMMA3, **_heads(5, 1, 32, vocab_size=49159, intermediate_size=163, rope_parameters=LOCAL), **_CAPPED},
    ),
    "split-phi3": Spec("phi3", _heads(6, 2, 32, sliding_window=13, vocab_size=32001, intermediate_size=417)),
    "split-phi3-partial": Spec(
        "phi3", _heads(9, 3, 32, vocab_size=32001, intermediate_size=289, partial_rotary_factor=0.75)
    ),
    "split-text": Spec(config=_heads(4, 2, 32, tie_word_embeddings=True), tokenizer=True),
    # 256 rows of it fill a slot of the shared segment.
    "split-wide": Spec("qwen3", _heads(8, 2, 32, hidden_size=1024, intermediate_size=320, max_position_embeddings=512)),
    # For GGUF: rows are whole blocks of 32.
    "gguf-llama": Spec(config=_heads(6, 2, 32, hidden_size=96, intermediate_size=224, vocab_size=300)),
    "gguf-rope3": Spec(config=_heads(4, 2, 16, rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "gguf-qwen3": Spec("qwen3", _heads(4, 2, 24, hidden_size=96, tie_word_embeddings=True)),
    "gguf-linear": Spec(config=_heads(4, 2, 16, rope_parameters=LINEAR)),
    "gguf-mistral": Spec("mistral", _heads(4, 1, 16, sliding_window=None)),
    "gguf-qwen2": Spec("qwen2", _heads(6, 2, 16, hidden_size=96, rope_parameters=YARN)),
    "gguf-gemma2": Spec("gemma2", {**_GEMMA2, **_heads(4, 2, 24, hidden_size=96), "query_pre_attn_scalar": 24}),
    "gguf-gemma3": Spec(
        "gemma3",
        {
            **_GEMMA3,
            **_heads(4, 1, 32, rope_parameters={**LOCAL, "sliding_attention": {"rope_theta": 10000.0}}),
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 7,
            "sliding_window_pattern": 6,
        },
    ),
    "gguf-phi3": Spec("phi3", _heads(4, 2, 16, sliding_window=13)),
    "gguf-longest-phi3": Spec(
        "phi3", {**_LONGROPE, "rope_parameters": longrope(12), "partial_rotary_factor": 0.75, "intermediate_size": 96}
    ),
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
            if "sliding_attention" in rope:
                config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
                rope = rope["full_attention"]
            config["rope_theta"] = rope.pop("rope_theta")
            kind = rope.pop("rope_type")
            config["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
        return path

    def gguf(self, name: str, kind: str = "F32") -> Path:
        """A GGUF file, with its matrices in a type of block (F32, F16, Q8_0, ...), or MIXED: each in its own."""
        path = self.root / f"{name}-{kind}.gguf"
        if not path.exists():
            write_gguf(path, self.model(name), SPECS[name].family, kind)
        return path

    def split_gguf(self, name: str, kind: str = "F32", tensors: int = 8) -> Path:
        """The first of the files of a split model, so many tensors in each."""
        if not (found := sorted(self.root.glob(f"{name}-{kind}-00001-of-*.gguf"))):
            path = self.root / f"{name}-{kind}.gguf"
            write_gguf(path, self.model(name), SPECS[name].family, kind, split_max_tensors=tensors)
            found = sorted(self.root.glob(f"{name}-{kind}-00001-of-*.gguf"))
        return found[0]


@contextmanager
def edited_json(path: Path) -> Iterator[dict[str, Any]]:
    """A JSON file's object, to be changed in place; then it is written back."""
    value = json.loads(path.read_text())
    yield value
    path.write_text(json.dumps(value))


def _build(name: str, spec: Spec) -> Any:
    import torch
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    make_config = getattr(transformers, f"{CLASSES[spec.family]}Config")
    make_model = getattr(transformers, f"{CLASSES[spec.family].removesuffix('Text')}ForCausalLM")
    # transformers refuses to make a model whose hidden size its heads do not divide, but runs the ones that exist.
    make_config.__class_validators__ = [v for v in make_config.__class_validators__ if "architecture" not in v.__name__]
    torch.manual_seed(zlib.crc32(name.encode()))  # of its own: a model more or less changes no other
    model = make_model(make_config(**{**BASE, **spec.config}))
    with torch.no_grad():
        for key, value in model.named_parameters():
            fill(key, value, 0.0 if spec.family.startswith("gemma") else 1.0)
    return in_dtype(model, spec.dtype)


def in_dtype(model: Any, dtype: str) -> Any:
    """A copy of a model with its parameters in a dtype; RoPE's frequencies stay float32 (`.to` would round them)."""
    import torch

    model = copy.deepcopy(model).eval()
    for value in model.parameters():
        value.data = value.data.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    return model


def fill(name: str, value: Any, norm: float) -> None:
    """Random biases and norms too (transformers would leave them 0 and `norm`), and matrices that keep the scale."""
    if value.ndim == 1:
        value.normal_(0.0, 0.25)
        if "norm" in name:
            value.add_(norm)
    else:
        value.normal_(0.0, value.shape[1] ** -0.5)


def write_tokenizer(path: Path, vocab_size: int, texts: Sequence[str] = TEXT) -> None:
    """A byte-level BPE tokenizer of at most so many tokens, learnt from some texts, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "chat_template": CHAT}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
