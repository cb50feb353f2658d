"""RoPE's frequencies and table of each kind against transformers', at the sizes of real models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from serried.layers.rope import KINDS, RopeConfig, inverse_frequencies, rope_table
from serried.models.hf_config import config_from_hf

HEADS, HIDDEN, TRAINED = 4, 512, 4096  # heads of 128
PAIRS = 64
RANDOM = np.random.default_rng(1)
PARAMETERS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "longrope": {
        "short_factor": [float(x) for x in RANDOM.uniform(1, 2, PAIRS)],
        "long_factor": [float(x) for x in RANDOM.uniform(2, 60, PAIRS)],
        "original_max_position_embeddings": 1024,
    },
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024,
    },
}  # fmt: skip


def theirs(kind: str, parameters: dict[str, Any], theta: float, longest: int | None = None) -> tuple[Any, float]:
    """Frequencies, and what cos and sin are multiplied with."""
    rope = {"rope_type": kind, "rope_theta": theta, **parameters}
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "max_position_embeddings": TRAINED}
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](LlamaConfig(**sizes, rope_parameters=rope), seq_len=longest)
    return frequencies.numpy(), factor


def ours(kind: str, parameters: dict[str, Any], theta: float) -> RopeConfig:
    raw = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "num_attention_heads": HEADS, "vocab_size": 64,
        "max_position_embeddings": TRAINED, "intermediate_size": 64, "num_hidden_layers": 1,
        "rope_parameters": {"rope_type": kind, "rope_theta": theta, **parameters},
    }  # fmt: skip
    return config_from_hf(raw, "config.json").rope


def assert_alike(kind: str, parameters: dict[str, Any], theta: float, longest: int) -> None:
    wanted, factor = theirs(kind, parameters, theta, longest)
    rope = ours(kind, parameters, theta)
    assert np.allclose(inverse_frequencies(rope, 2 * PAIRS, longest), wanted, rtol=2e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor)


def test_every_kind_is_here() -> None:
    assert set(PARAMETERS) == set(KINDS) - {"default"}


@pytest.mark.parametrize("longest", [1024, 1025, 4096, 4097, 20000])
@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("kind", PARAMETERS)
def test_frequencies(kind: str, theta: float, longest: int) -> None:
    assert_alike(kind, PARAMETERS[kind], theta, longest)


@settings(deadline=None)
@given(
    factor=st.floats(1.0, 64.0),
    original=st.integers(64, 4096),
    theta=st.floats(100.0, 1e7),
    turns=st.tuples(st.floats(0.5, 4.0), st.floats(4.5, 64.0)),
    truncate=st.booleans(),
    scales=st.none() | st.tuples(st.floats(0.1, 2.0), st.floats(0.1, 2.0)),
)
def test_yarn(
    factor: float,
    original: int,
    theta: float,
    turns: tuple[float, float],
    truncate: bool,
    scales: tuple[float, float] | None,
) -> None:
    parameters = {
        "factor": factor, "original_max_position_embeddings": original, "beta_slow": turns[0], "beta_fast": turns[1],
        "truncate": truncate,
    }  # fmt: skip
    if scales is not None:
        parameters |= {"mscale": scales[0], "mscale_all_dim": scales[1]}
    assert_alike("yarn", parameters, theta, 0)


def test_the_table_is_scaled() -> None:
    rope = ours("longrope", PARAMETERS["longrope"], 1e4)
    assert rope.attention_factor > 1.05
    cos, sin = rope_table(rope, 2 * PAIRS, 1030)
    angles = np.outer(np.arange(1030), 1e4 ** -(np.arange(PAIRS) / PAIRS) / PARAMETERS["longrope"]["long_factor"])
    assert cos.shape == (1030, PAIRS)
    assert cos.dtype == sin.dtype == np.float32
    assert np.allclose(cos, np.cos(angles) * rope.attention_factor, atol=1e-4)
    assert np.allclose(sin, np.sin(angles) * rope.attention_factor, atol=1e-4)
    assert np.allclose(rope_table(rope, 2 * PAIRS, 1024)[0][0], rope.attention_factor)
    short = np.outer(np.arange(9), 1e4 ** -(np.arange(PAIRS) / PAIRS) / PARAMETERS["longrope"]["short_factor"])
    assert np.allclose(rope_table(rope, 2 * PAIRS, 9)[0], np.cos(short) * rope.attention_factor, atol=1e-5)
