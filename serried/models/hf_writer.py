"""A Hugging Face config.json of a ModelConfig, for a model that comes out of another format."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from serried.errors import InputError
from serried.layers.rope import RopeConfig
from serried.models.config import ModelConfig
from serried.models.hf_config import ATTENTION_CAP, LOGIT_CAP, WHOLE_NORMS, config_from_hf

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
_YARN = ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate")


def hf_from_config(config: ModelConfig, where: str) -> dict[str, Any]:
    """A config.json's content, from which config_from_hf makes the same config; `where` names the model in errors."""
    raw = {
        "architectures": [config.family.architectures[0]],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        WHOLE_NORMS: config.norm_offset != config.family.norm_offset,
        "query_pre_attn_scalar": round(config.attention_scale**-2),
        ATTENTION_CAP: config.attention_cap or None,
        LOGIT_CAP: config.logit_cap or None,
        config.family.activation_key: config.activation,
        "attention_bias": config.attention_output_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
        **_windows(config),
        **_positions(config),
    }
    back = config_from_hf(raw, where)
    lost = [field.name for field in fields(config) if getattr(back, field.name) != getattr(config, field.name)]
    if lost:
        raise InputError(f"{where}: config.json cannot say its {', '.join(lost)}")
    return raw


def _windows(config: ModelConfig) -> dict[str, Any]:
    window = max(config.windows)
    if config.family.windows == "none":
        return {}
    return {
        "use_sliding_window": bool(window),
        "sliding_window": window or None,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in config.windows],
    }


def _positions(config: ModelConfig) -> dict[str, Any]:
    """The longest sequence and RoPE."""
    rope, local = config.rope, config.local_rope
    stretched = rope.kind == "linear" and local is None  # the reader multiplies what the model was trained for
    scaling = _scaling(rope)
    raw: dict[str, Any] = {
        "max_position_embeddings": math.ceil(config.max_position / rope.factor) if stretched else config.max_position,
        "original_max_position_embeddings": None,  # so that no default of the family comes before what RoPE says
        "rope_parameters": {"full_attention": scaling, "sliding_attention": _scaling(local)} if local else scaling,
    }
    if config.rotary_dim != config.head_dim:
        part = config.rotary_dim / config.head_dim
        whole = int(part * config.head_dim) == config.rotary_dim  # the reader rounds down
        raw["partial_rotary_factor"] = part if whole else math.nextafter(part, 1)
    return raw


def _scaling(rope: RopeConfig) -> dict[str, Any]:
    said: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.original_max_position:
        said["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "linear":
        said["factor"] = rope.factor
    elif rope.kind == "llama3":
        said |= {name: getattr(rope, name) for name in _LLAMA3}
    elif rope.kind == "yarn":
        said |= {name: getattr(rope, name) for name in _YARN}
    elif rope.kind == "longrope":
        said |= {"short_factor": list(rope.factors), "long_factor": list(rope.long_factors)}
        said["attention_factor"] = rope.attention_factor
    elif rope.kind == "factors":
        said["factors"] = list(rope.factors)
    return said
