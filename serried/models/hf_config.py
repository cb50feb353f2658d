"""ModelConfig from a Hugging Face config.json. What is unknown and would change the result is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serried.errors import InputError
from serried.models.config import ACTIVATIONS, ModelConfig
from serried.models.families import find_family
from serried.models.family import Family
from serried.models.hf_rope import longest_context, ropes_from_hf, rotary_dim
from serried.models.reader import Reader

# Ours, in what hf_writer.py writes: the values of norms are whole weights, whatever is added for others of the family.
WHOLE_NORMS = "whole_norms"
# Keys that change the computation and are not built for any family, with the values that leave it unchanged.
REFUSED: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("quantization_config", (None,)),
    ("num_experts", (None, 0)),
    ("num_local_experts", (None, 0)),
)
ATTENTION_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
OF_THE_WHOLE = ("eos_token_id", "bos_token_id", "tie_word_embeddings", "quantization_config")


def config_from_hf(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Read a config.json's content; `where` names it in errors."""
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise Reader(raw, where).fail("architectures", f"is {architectures!r}; expected a list of one name")
    family = find_family(str(architectures[0]), where)
    read = _decoder_part(raw, family, where)
    _refuse_unknown(read, family)
    heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
    head_dim, layers = read.integer("head_dim", hidden // heads), read.integer("num_hidden_layers")
    turned = rotary_dim(read, family, head_dim)
    rope, local_rope = ropes_from_hf(read, family, turned)
    bias = read.flag("attention_bias") and not family.qkv_bias
    config = ModelConfig(
        family=family,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rotary_dim=turned,
        norm_eps=read.number("rms_norm_eps", 1e-6),
        norm_offset=0.0 if read.flag(WHOLE_NORMS) else family.norm_offset,
        rope=rope,
        local_rope=local_rope,
        windows=_windows(read, family, layers),
        max_position=longest_context(rope, family, read.integer("max_position_embeddings")),
        attention_scale=read.number("query_pre_attn_scalar", head_dim) ** -0.5,
        attention_cap=_cap(read, ATTENTION_CAP) if family.attention_cap else 0.0,
        logit_cap=_cap(read, LOGIT_CAP) if family.logit_cap else 0.0,
        activation=_activation(read, family),
        attention_bias=bias or family.qkv_bias,
        attention_output_bias=bias,
        mlp_bias=read.flag("mlp_bias"),
        tied=read.flag("tie_word_embeddings", default=family.tied),
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
    if config.rotary_dim % 2:
        raise InputError(f"{where}: head_dim is {config.head_dim}; RoPE needs an even one")
    if config.rope.kind == "factors" and len(config.rope.factors) != config.head_dim // 2:
        raise InputError(
            f"{where}: {len(config.rope.factors)} RoPE factors for {config.head_dim // 2} pairs of a head's columns"
        )


def pattern_windows(window: int, period: int, layers: int) -> tuple[int, ...]:
    """Each layer's window: every so-manieth layer (1: every one) sees everything (0), the others a window."""
    return tuple(window if (i + 1) % period else 0 for i in range(layers))


def _decoder_part(raw: Mapping[str, Any], family: Family, where: str) -> Reader:
    """The keys of the decoder, with the family's defaults."""
    if family.nested is None:
        return Reader({**family.defaults, **raw}, where)
    inner = raw.get(family.nested)
    if not isinstance(inner, dict):
        raise Reader(raw, where).fail(family.nested, f"is {inner!r}; expected the text model's config, an object")
    whole = {key: raw[key] for key in OF_THE_WHOLE if key in raw}
    return Reader({**family.defaults, **inner, **whole}, f"{where}: {family.nested}")


def _refuse_unknown(read: Reader, family: Family) -> None:
    caps = [(ATTENTION_CAP, family.attention_cap), (LOGIT_CAP, family.logit_cap)]
    unbuilt = [(key, (None,)) for key, built in caps if not built and key not in family.unused]
    for key, harmless in (*REFUSED, *unbuilt, *family.refused):
        if key in read.raw and read.raw[key] not in harmless:
            raise read.fail(key, f"is {read.raw[key]!r}, which is not supported for {family.name}")


def _windows(read: Reader, family: Family, layers: int) -> tuple[int, ...]:
    """Each layer's window; 0 where it sees everything."""
    kinds = None if family.windows == "all" else read.raw.get("layer_types")
    if family.windows == "none":
        if any(kind != "full_attention" for kind in kinds or ()):
            raise read.fail("layer_types", f"is {kinds!r}; only 'full_attention' is supported for {family.name}")
        return (0,) * layers
    off = family.windows == "upper" and not read.flag("use_sliding_window")
    if off or read.raw.get("sliding_window") is None:
        if kinds and "sliding_attention" in kinds:
            raise read.fail("layer_types", "holds 'sliding_attention', but the config sets no sliding_window")
        return (0,) * layers
    window = read.integer("sliding_window")
    if kinds is not None:
        return _listed_windows(read, kinds, window, layers)
    if family.windows == "upper":
        first = _whole_number(read, "max_window_layers")
        return tuple(window if i >= first else 0 for i in range(layers))
    if family.windows == "pattern":
        return pattern_windows(window, _period(read, family), layers)
    return (window,) * layers


def _listed_windows(read: Reader, kinds: object, window: int, layers: int) -> tuple[int, ...]:
    known = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise read.fail(
            "layer_types", f"is {kinds!r}; expected 'full_attention' or 'sliding_attention' for each of {layers} layers"
        )
    return tuple(known[kind] for kind in kinds)


def _period(read: Reader, family: Family) -> int:
    key = "sliding_window_pattern"
    return read.integer(key if key in read.raw else f"_{key}", family.pattern)


def _whole_number(read: Reader, key: str) -> int:
    """A count that may be 0."""
    return 0 if read.raw.get(key) == 0 else read.integer(key)


def _cap(read: Reader, key: str) -> float:
    """A soft cap; 0 where there is none."""
    return 0.0 if read.raw.get(key) is None else read.number(key)


def _activation(read: Reader, family: Family) -> str:
    key = family.activation_key
    name = read.raw.get(key) or family.activation
    if name not in ACTIVATIONS:
        raise read.fail(key, f"is {name!r}; supported are {', '.join(ACTIVATIONS)}")
    return str(name)
