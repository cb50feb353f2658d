"""What a model is: the frozen ModelConfig that everything else asks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from serried.layers.rope import RopeConfig
from serried.models.family import Family
from serried.parallel.partition import ModelPartition

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model: the sizes of the whole, unsplit model, its switches, its token ids.

    rotary_dim: the columns of a head that RoPE turns. norm_offset: what is added to a norm's values in this checkpoint
    to make its weight. windows: for each layer the positions that a token sees, its own included (0: all). local_rope:
    the RoPE of layers with a window; None where it is everybody's. attention_cap, logit_cap: x becomes
    cap * tanh(x / cap) (0: stays). max_position: the longest sequence that the model is meant for.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int, ...]
    attention_scale: float
    max_position: int
    local_rope: RopeConfig | None = None
    norm_offset: float = 0.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    activation: str = "silu"
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def qk_norm(self) -> bool:
        return self.family.qk_norm

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied with."""
        return math.sqrt(self.hidden_size) if self.family.scaled_embedding else 1.0

    def rope_of(self, layer: int) -> RopeConfig:
        """The RoPE of a layer."""
        return self.local_rope if self.local_rope is not None and self.windows[layer] else self.rope

    def positions_read(self, start: int, stop: int) -> int:
        """The positions that tokens [start, stop) of a sequence attend to, of all layers together."""
        return sum(_read_by_first(stop, window) - _read_by_first(start, window) for window in self.windows)

    def partition(self, weights: Sequence[int]) -> ModelPartition:
        """How the model is split over ranks of the given weights (InputError where it cannot be)."""
        return ModelPartition(
            query_heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            mlp_columns=self.intermediate_size,
            vocab_rows=self.vocab_size,
            weights=tuple(weights),
        )


def _read_by_first(tokens: int, window: int) -> int:
    """The positions that so many tokens attend to from the start of a sequence: 1, 2, 3, ... up to the window each."""
    growing = min(tokens, window) if window else tokens
    return growing * (growing + 1) // 2 + (tokens - growing) * window
