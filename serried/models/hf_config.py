"""ModelConfig from a Hugging Face config.json. What is unknown and would change the result is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serried.errors import InputError
from serried.layers.rope import RopeConfig
from serried.models.config import ACTIVATIONS, ModelConfig
from serried.models.families import find_family
from serried.models.family import Family

# Keys that change the computation and are not built for any family, with the values that leave it unchanged.
REFUSED: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("quantization_config", (None,)),
    ("partial_rotary_factor", (None, 1, 1.0)),
    ("attn_logit_softcapping", (None,)),
    ("final_logit_softcapping", (None,)),
    ("num_experts", (None, 0)),
    ("num_local_experts", (None, 0)),
)


class Reader:
    """Typed access to the keys of a config; errors name the file and the key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def fail(self, key: str, problem: str) -> InputError:
        return InputError(f"{self.where}: {key}: {problem}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "is missing; the model cannot be built without it")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.fail(key, f"is {value!r}; expected a positive number")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value) or value >= 1 << 31:
            raise self.fail(key, f"is {value!r}; expected a whole number below 2^31")
        return int(value)

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value not in (None, True, False):
            raise self.fail(key, f"is {value!r}; expected true or false")
        return bool(value)

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.raw.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.fail(key, f"is {value!r}; expected a token id or a list of them")
        return tuple(ids)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; InputError where it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds a JSON {type(value).__name__}; expected an object")
    return value


def config_from_hf(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Read a config.json's content; `where` names it in errors."""
    read = Reader(raw, where)
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise read.fail("architectures", f"is {architectures!r}; expected a list of one name")
    family = find_family(str(architectures[0]), where)
    _refuse_unknown(read, family)
    heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
    bias = read.flag("attention_bias")
    config = ModelConfig(
        family=family,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=read.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=read.integer("num_key_value_heads", heads),
        head_dim=read.integer("head_dim", hidden // heads),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        rope=_rope(read),
        max_position=read.integer("max_position_embeddings"),
        activation=_activation(read),
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=read.flag("mlp_bias"),
        tied=read.flag("tie_word_embeddings"),
        bos_id=next(iter(read.ids("bos_token_id")), None),
        eos_ids=read.ids("eos_token_id"),
    )
    check_shape(config, where)
    return config


def check_shape(config: ModelConfig, where: str) -> None:
    """Refuse sizes that no decoder of this kind can have."""
    if config.num_heads % config.num_kv_heads:
        raise InputError(
            f"{where}: {config.num_heads} query heads are not a multiple of {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise InputError(f"{where}: head_dim is {config.head_dim}; RoPE needs an even one")


def _refuse_unknown(read: Reader, family: Family) -> None:
    for key, harmless in (*REFUSED, *family.refused):
        if key in read.raw and read.raw[key] not in harmless:
            raise read.fail(key, f"is {read.raw[key]!r}, which is not supported for {family.name}")
    for kind in read.raw.get("layer_types") or ():
        if kind != "full_attention":
            raise read.fail("layer_types", f"holds {kind!r}; only 'full_attention' is supported")


def _activation(read: Reader) -> str:
    name = read.raw.get("hidden_act") or "silu"
    if name not in ACTIVATIONS:
        raise read.fail("hidden_act", f"is {name!r}; supported are {', '.join(ACTIVATIONS)}")
    return str(name)


def _rope(read: Reader) -> RopeConfig:
    """RoPE from `rope_scaling` (key `type` or `rope_type`) or from the newer `rope_parameters`."""
    key = "rope_parameters" if read.raw.get("rope_parameters") else "rope_scaling"
    scaling = read.raw.get(key) or {}
    if not isinstance(scaling, dict):
        raise read.fail(key, f"is {scaling!r}; expected an object")
    inner = Reader(scaling, f"{read.where}: {key}")
    theta = inner.number("rope_theta", read.number("rope_theta", 10000.0))
    if inner.raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise inner.fail("partial_rotary_factor", "only 1 is supported")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta)
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind="llama3",
            factor=inner.number("factor"),
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
            original_max_position=inner.integer("original_max_position_embeddings"),
        )
    raise inner.fail("rope_type", f"is {kind!r}; supported are default, llama3")
