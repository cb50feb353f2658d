"""What a model is: the frozen ModelConfig that everything else asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serried.layers.rope import RopeConfig
from serried.models.family import Family
from serried.parallel.partition import ModelPartition

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only model: the sizes of the whole, unsplit model, its switches, its token ids."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_position: int
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
