"""RopeConfig from a Hugging Face config.json, in the spelling of transformers 5 or in the older one."""

from __future__ import annotations

import math
from typing import Any

from serried.errors import InputError
from serried.layers.rope import KINDS, RopeConfig
from serried.models.family import Family
from serried.models.reader import Reader


def rope_parameters(read: Reader) -> tuple[Reader, Reader | None]:
    """What is said of RoPE: `rope_scaling` or the newer `rope_parameters`; for each layer type, where it is nested.

    The second is that of the layers with a window, None where the two are not kept apart.
    """
    key = "rope_parameters" if read.raw.get("rope_parameters") else "rope_scaling"
    scaling = read.raw.get(key) or {}
    if not isinstance(scaling, dict):
        raise read.fail(key, f"is {scaling!r}; expected an object")
    if not {"full_attention", "sliding_attention"} & scaling.keys():
        return Reader(scaling, f"{read.where}: {key}"), None
    parts = []
    for kind in ("full_attention", "sliding_attention"):
        part = scaling.get(kind) or {}
        if not isinstance(part, dict):
            raise Reader(scaling, f"{read.where}: {key}").fail(kind, f"is {part!r}; expected an object")
        parts.append(Reader(part, f"{read.where}: {key}: {kind}"))
    return parts[0], parts[1]


def rotary_dim(read: Reader, family: Family, head_dim: int) -> int:
    """The columns of a head that are rotated."""
    inner, local = rope_parameters(read)
    for at in (inner, local, read):
        factor = at.raw.get("partial_rotary_factor") if at else None
        if at is None or factor is None:
            continue
        if factor != 1 and not family.partial_rotary:
            raise at.fail("partial_rotary_factor", f"is {factor!r}; only 1 is supported for {family.name}")
        dim = int(head_dim * at.number("partial_rotary_factor"))
        if not 0 < dim <= head_dim or dim % 2:
            raise at.fail(
                "partial_rotary_factor",
                f"is {factor!r}, which rotates {dim} of {head_dim} columns; expected an even number of at most as many",
            )
        return dim
    return head_dim


def ropes_from_hf(read: Reader, family: Family, dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """The model's RoPE, and that of layers with a window where the family gives them their own.

    dim: the columns of a head that are rotated.
    """
    inner, local = rope_parameters(read)
    rope = _rope(read, inner, family, read.number("rope_theta", 10000.0), dim)
    if family.local_theta is None:
        if local is not None:
            raise inner.fail("rope_parameters", f"differs between layer types, which {family.name} models do not have")
        return rope, None
    theta = read.number("rope_local_base_freq", family.local_theta)
    return rope, _rope(read, local or Reader({}, read.where), family, theta, dim)


def longest_context(rope: RopeConfig, family: Family, trained: int) -> int:
    """The positions that the model is meant for, given its max_position_embeddings.

    RoPE of the kinds linear, dynamic and yarn stretches them by its factor; Gemma 3 and longrope count the stretched
    ones already.
    """
    if rope.kind == "dynamic" or (rope.kind == "linear" and family.local_theta is None):
        return int(trained * max(rope.factor, 1))
    if rope.kind == "yarn":
        return max(trained, int(rope.original_max_position * rope.factor))
    return trained


def _rope(read: Reader, inner: Reader, family: Family, theta: float, dim: int) -> RopeConfig:
    theta = inner.number("rope_theta", theta)
    kind: Any = inner.raw.get("rope_type") or inner.raw.get("type") or "default"
    kind = family.rope_kinds.get(kind, kind) if isinstance(kind, str) else kind
    if kind == "factors":  # our own, for what comes out of a GGUF file
        return RopeConfig(theta, kind, factors=inner.numbers("factors", dim // 2))
    if kind not in KINDS:
        raise inner.fail("rope_type", f"is {kind!r}; supported are {', '.join(KINDS)}")
    if kind == "linear":
        return RopeConfig(theta, kind, inner.number("factor"))
    if kind == "dynamic":
        trained = read.integer("max_position_embeddings")
        return RopeConfig(theta, kind, inner.number("factor"), original_max_position=trained)
    if kind == "yarn":
        return _yarn(read, inner, theta)
    if kind == "longrope":
        return _longrope(read, inner, theta, dim)
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind="llama3",
            factor=inner.number("factor"),
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
            original_max_position=inner.integer("original_max_position_embeddings"),
        )
    return RopeConfig(theta)


def _original(read: Reader, inner: Reader) -> int:
    """What the model was trained for before it was stretched: beside the RoPE's own keys (as in Phi-3), or in them."""
    key = "original_max_position_embeddings"
    return read.integer(key, inner.integer(key, read.integer("max_position_embeddings")))


def _yarn(read: Reader, inner: Reader, theta: float) -> RopeConfig:
    original = _original(read, inner)
    factor = inner.number("factor", read.integer("max_position_embeddings") / original)
    if inner.raw.get("mscale") and inner.raw.get("mscale_all_dim"):
        attention = yarn_scale(factor, inner.number("mscale")) / yarn_scale(factor, inner.number("mscale_all_dim"))
    else:
        attention = yarn_scale(factor)
    beta_fast, beta_slow = inner.number("beta_fast", 32.0), inner.number("beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise inner.fail("beta_fast", f"is {beta_fast}, below beta_slow, {beta_slow}; expected at least as many turns")
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        attention_factor=inner.number("attention_factor", attention),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=inner.flag("truncate", default=True),
    )


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """What YaRN multiplies cos and sin with, of contexts stretched by a factor."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(read: Reader, inner: Reader, theta: float, dim: int) -> RopeConfig:
    original = _original(read, inner)
    factor = inner.number("factor", read.integer("max_position_embeddings") / original)
    if original == 1:
        raise InputError(f"{read.where}: original_max_position_embeddings: is 1; expected a context length")
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        theta,
        "longrope",
        original_max_position=original,
        factors=inner.numbers("short_factor", dim // 2),
        long_factors=inner.numbers("long_factor", dim // 2),
        attention_factor=inner.number("attention_factor", attention),
    )
