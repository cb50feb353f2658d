"""ModelConfig from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serried.errors import InputError
from serried.layers.rope import RopeConfig
from serried.models.config import ModelConfig
from serried.models.families import find_family
from serried.models.family import Family
from serried.models.hf_config import ATTENTION_CAP, LOGIT_CAP, check_shape, pattern_windows
from serried.models.hf_rope import longest_context, yarn_scale
from serried.models.reader import Reader

# Tensors that hold numbers of RoPE: Llama 3.1's scaling; longrope's, for short contexts and for long ones.
ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"

Factors = Mapping[str, tuple[float, ...]]  # by the name of the tensor


def config_from_gguf(metadata: Mapping[str, Any], names: frozenset[str], factors: Factors, where: str) -> ModelConfig:
    """Read a GGUF file's metadata.

    names: the tensors of the file, under Hugging Face names (they say which biases exist, and whether the LM head is
    tied). factors: its tensors of RoPE. `where` names the file in errors.
    """
    arch = str(metadata.get("general.architecture"))
    family = find_family(arch, where)
    read = _Keys(metadata, where, arch)
    heads, hidden = read.integer("attention.head_count"), read.integer("embedding_length")
    head_dim, layers = read.integer("attention.key_length", hidden // heads), read.integer("block_count")
    rotary_dim = _rotary_dim(read, family, head_dim)
    rope, local_rope = _ropes(read, family, factors, rotary_dim)
    layer = family.names.layer.format(i=0)
    config = ModelConfig(
        family=family,
        vocab_size=read.integer("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None),
        hidden_size=hidden,
        intermediate_size=read.integer("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        norm_eps=read.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        local_rope=local_rope,
        windows=_windows(read, family, layers),
        max_position=longest_context(rope, family, read.integer("context_length")),
        attention_scale=(hidden // heads if layers in family.gguf_scales else head_dim) ** -0.5,
        attention_cap=_cap(read, family, ATTENTION_CAP) if family.attention_cap else 0.0,
        logit_cap=_cap(read, family, LOGIT_CAP) if family.logit_cap else 0.0,
        activation=family.activation,
        attention_bias=f"{layer}.{family.names.qkv[0]}.bias" in names,
        attention_output_bias=f"{layer}.{family.names.o_proj}.bias" in names,
        mlp_bias=f"{layer}.{family.names.down_proj}.bias" in names,
        tied=f"{family.names.lm_head}.weight" not in names,
        bos_id=next(iter(Reader(metadata, where).ids("tokenizer.ggml.bos_token_id")), None),
        eos_ids=_ends(Reader(metadata, where)),
    )
    check_shape(config, where)
    return config


class _Keys(Reader):
    """The keys that begin with the architecture's name."""

    def __init__(self, metadata: Mapping[str, Any], where: str, arch: str) -> None:
        prefix = f"{arch}."
        own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        super().__init__(own, where)
        self._prefix = prefix

    def fail(self, key: str, problem: str) -> InputError:
        return super().fail(self._prefix + key, problem)


def _ends(read: Reader) -> tuple[int, ...]:
    ids = read.ids("tokenizer.ggml.eos_token_id") + read.ids("tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(ids))


def _rotary_dim(read: Reader, family: Family, head_dim: int) -> int:
    """The columns of a head that are rotated; what else the head dimension decides is refused where it differs."""
    if read.integer("attention.value_length", head_dim) != head_dim:
        raise read.fail("attention.value_length", f"differs from the head dimension {head_dim}; not supported")
    if read.raw.get("expert_count"):
        raise read.fail("expert_count", "mixture-of-experts models are not supported")
    key = "rope.dimension_count"
    dim = read.integer(key, head_dim)
    if dim != head_dim and not (family.partial_rotary and dim < head_dim):
        raise read.fail(key, f"is {dim}, which differs from the head dimension {head_dim}; not supported")
    return dim


def _windows(read: Reader, family: Family, layers: int) -> tuple[int, ...]:
    """Each layer's window; 0 where it sees everything, and everywhere where the file's window is 0."""
    key = "attention.sliding_window"
    if not read.raw.get(key) and (key in read.raw or family.windows != "pattern"):
        return (0,) * layers
    window = read.integer(key)
    if family.windows != "pattern":
        return (window,) * layers
    key = "attention.sliding_window_pattern"
    listed = read.raw.get(key)
    if not isinstance(listed, list):
        return pattern_windows(window, read.integer(key, family.pattern), layers)
    if len(listed) != layers:
        raise read.fail(key, f"is a list of {len(listed)}; the model has {layers} layers")
    return tuple(window if sliding else 0 for sliding in listed)


def _cap(read: Reader, family: Family, key: str) -> float:
    """A soft cap; 0 where there is none."""
    default = family.defaults.get(key)
    return read.number(key, default) if key in read.raw or default else 0.0


def _ropes(read: Reader, family: Family, factors: Factors, dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    theta = read.number("rope.freq_base", 10000.0)
    rope, key = _rope(read, factors, theta, dim), "rope.freq_base_swa"
    if family.local_theta is not None:
        return rope, RopeConfig(read.number(key, family.local_theta))
    if read.number(key, theta) != theta:
        raise read.fail(key, f"is {read.raw[key]!r}; {family.name} models have one RoPE")
    return rope, None


def _rope(read: Reader, factors: Factors, theta: float, dim: int) -> RopeConfig:
    for name, values in factors.items():
        if len(values) != dim // 2:
            raise InputError(f"{read.where}: {name} holds {len(values)} numbers; expected {dim // 2}")
    kind = read.raw.get("rope.scaling.type", "none")
    original = read.integer("rope.scaling.original_context_length", read.integer("context_length"))
    attention = read.number("rope.scaling.attn_factor", 1.0)
    if SHORT_FACTORS in factors and LONG_FACTORS in factors and kind in ("none", "longrope"):
        return RopeConfig(
            theta,
            "longrope",
            original_max_position=original,
            factors=factors[SHORT_FACTORS],
            long_factors=factors[LONG_FACTORS],
            attention_factor=attention,
        )
    if kind == "none":
        own = factors.get(ROPE_FACTORS)
        return RopeConfig(theta, "factors", factors=own) if own else RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", read.number("rope.scaling.factor"))
    if kind == "yarn":
        return _yarn(read, theta, original, attention)
    raise read.fail("rope.scaling.type", f"is {kind!r}; supported are none, linear, yarn, longrope with its factors")


def _yarn(read: Reader, theta: float, original: int, attention: float) -> RopeConfig:
    for key, neutral in (("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if read.raw.get(f"rope.scaling.{key}", neutral) != neutral:
            raise read.fail(f"rope.scaling.{key}", f"is {read.raw[f'rope.scaling.{key}']!r}; supported is {neutral}")
    factor = read.number("rope.scaling.factor")
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        attention_factor=attention * yarn_scale(factor),
        beta_fast=read.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read.number("rope.scaling.yarn_beta_slow", 1.0),
    )
