"""Rotary position embedding: the frequencies of each kind, and the table of cos and sin."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base and how its frequencies are changed.

    kind `default`: unchanged. kind `llama3`: Llama 3.1's smooth scaling, with its four numbers. kind `factors`: each
    frequency is divided by its own factor (GGUF stores Llama 3.1's scaling so).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    factors: tuple[float, ...] = ()


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Float32:
    """The angle that each pair of a head turns by from one position to the next: float32 [head_dim / 2]."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = (np.float32(1.0) / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.kind == "llama3":
        return _llama3(base, rope)
    if rope.kind == "factors":
        return (base / np.asarray(rope.factors, np.float32)).astype(np.float32)
    return base


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


def rope_table(rope: RopeConfig, head_dim: int, positions: int) -> tuple[Float32, Float32]:
    """cos and sin for positions 0 to `positions` - 1: float32 [positions, head_dim / 2] each."""
    angles = np.outer(np.arange(positions, dtype=np.float32), inverse_frequencies(rope, head_dim))
    return np.cos(angles), np.sin(angles)
