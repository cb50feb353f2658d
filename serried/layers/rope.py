"""Rotary position embedding: the frequencies of each kind, and the table of cos and sin."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")  # that a config can ask for


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base and how its frequencies are changed.

    kind `default`: unchanged. `linear`: all divided by `factor`. `dynamic`: the base grows with the longest sequence
    beyond `original_max_position`. `yarn`: short wavelengths kept, long ones divided by `factor`, by the number of
    turns (`beta_fast`, `beta_slow`) in `original_max_position`; `truncate` rounds the edges outwards. `longrope`: each
    divided by its own factor, of `long_factors` where the longest sequence exceeds `original_max_position`, else of
    `factors`. `llama3`: Llama 3.1's smooth scaling, with its four numbers. `factors`: each divided by its own factor
    (GGUF stores Llama 3.1's scaling so). attention_factor: what cos and sin are multiplied with.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def inverse_frequencies(rope: RopeConfig, dim: int, longest: int = 0) -> Float32:
    """The angle that each pair of columns turns by from one position to the next: float32 [dim / 2].

    dim: columns of a head that are rotated. longest: the longest sequence that there can be.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    theta = _dynamic_base(rope, dim, longest) if rope.kind == "dynamic" else rope.theta
    base = (np.float32(1.0) / np.float32(theta) ** exponents).astype(np.float32)
    if rope.kind == "linear":
        return (base / np.float32(rope.factor)).astype(np.float32)
    if rope.kind == "yarn":
        return _yarn(base, rope)
    if rope.kind == "llama3":
        return _llama3(base, rope)
    if rope.kind in ("factors", "longrope"):
        long = rope.kind == "longrope" and longest > rope.original_max_position
        return (base / np.asarray(rope.long_factors if long else rope.factors, np.float32)).astype(np.float32)
    return base


def _dynamic_base(rope: RopeConfig, dim: int, longest: int) -> float:
    """NTK scaling: the base of the longest sequence, for all sequences."""
    beyond = max(longest, rope.original_max_position) / rope.original_max_position
    return float(rope.theta * (rope.factor * beyond - (rope.factor - 1)) ** (dim / (dim - 2)))


def _yarn(base: Float32, rope: RopeConfig) -> Float32:
    """Pairs before `low` turn often enough to keep their frequency, those after `high` are slowed; a ramp between."""
    dim = 2 * base.size

    def pair_with(turns: float) -> float:
        return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    slowed = np.clip((np.arange(base.size, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    result: Float32 = (base / np.float32(rope.factor) * slowed + base * (1 - slowed)).astype(np.float32)
    return result


def _llama3(base: Float32, rope: RopeConfig) -> Float32:
    """Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, those between interpolated."""
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    wavelength = (2 * math.pi / base).astype(np.float32)
    slowed = base / np.float32(rope.factor)
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * slowed + smooth * base
    return np.where(wavelength > low, slowed, np.where(wavelength < high, base, between)).astype(np.float32)


def rope_table(rope: RopeConfig, dim: int, positions: int) -> tuple[Float32, Float32]:
    """cos and sin for positions 0 to `positions` - 1, the longest sequence: float32 [positions, dim / 2] each."""
    angles = np.outer(np.arange(positions, dtype=np.float32), inverse_frequencies(rope, dim, positions))
    factor = np.float32(rope.attention_factor)
    return np.cos(angles) * factor, np.sin(angles) * factor
