"""ModelConfig from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serried.errors import InputError
from serried.layers.rope import RopeConfig
from serried.models.config import ModelConfig
from serried.models.families import find_family
from serried.models.hf_config import Reader, check_shape


def config_from_gguf(
    metadata: Mapping[str, Any], names: frozenset[str], factors: tuple[float, ...], where: str
) -> ModelConfig:
    """Read a GGUF file's metadata.

    names: the tensors of the file, under Hugging Face names (they say which biases exist, and whether the LM head is
    tied). factors: its rope_freqs, if it has them. `where` names the file in errors.
    """
    arch = metadata.get("general.architecture")
    family = find_family(str(arch), where)
    read = Reader(metadata, where)
    heads, hidden = read.integer(f"{arch}.attention.head_count"), read.integer(f"{arch}.embedding_length")
    head_dim = read.integer(f"{arch}.attention.key_length", hidden // heads)
    _refuse(read, str(arch), head_dim)
    layer = family.names.layer.format(i=0)
    config = ModelConfig(
        family=family,
        vocab_size=read.integer(f"{arch}.vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None),
        hidden_size=hidden,
        intermediate_size=read.integer(f"{arch}.feed_forward_length"),
        num_layers=read.integer(f"{arch}.block_count"),
        num_heads=heads,
        num_kv_heads=read.integer(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=read.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope=_rope(read, str(arch), factors),
        max_position=read.integer(f"{arch}.context_length"),
        attention_bias=f"{layer}.{family.names.q_proj}.bias" in names,
        attention_output_bias=f"{layer}.{family.names.o_proj}.bias" in names,
        mlp_bias=f"{layer}.{family.names.down_proj}.bias" in names,
        tied=f"{family.names.lm_head}.weight" not in names,
        bos_id=next(iter(read.ids("tokenizer.ggml.bos_token_id")), None),
        eos_ids=tuple(dict.fromkeys(read.ids("tokenizer.ggml.eos_token_id") + read.ids("tokenizer.ggml.eot_token_id"))),
    )
    check_shape(config, where)
    return config


def _rope(read: Reader, arch: str, factors: tuple[float, ...]) -> RopeConfig:
    theta = read.number(f"{arch}.rope.freq_base", 10000.0)
    kind = read.raw.get(f"{arch}.rope.scaling.type", "none")
    if kind != "none":
        raise read.fail(f"{arch}.rope.scaling.type", f"is {kind!r}; supported is none (or rope_freqs)")
    return RopeConfig(theta, "factors", factors=factors) if factors else RopeConfig(theta)


def _refuse(read: Reader, arch: str, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if read.integer(f"{arch}.{key}", head_dim) != head_dim:
            raise read.fail(f"{arch}.{key}", f"differs from the head dimension {head_dim}; not supported")
    if read.raw.get(f"{arch}.expert_count"):
        raise InputError(f"{read.where}: {arch}.expert_count: mixture-of-experts models are not supported")
