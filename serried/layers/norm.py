"""RMSNorm, alone or fused with the reduction before it."""

from __future__ import annotations

from serried.backends.base import Backend, Handle, Partial
from serried.layers.layer import Layer
from serried.weights.spec import Parameter, ShardSpec


class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + eps) * weight over the float32 residual stream; every rank holds the whole weight."""

    def __init__(self, name: str, hidden: int, eps: float) -> None:
        self.eps = eps
        self.weight = Parameter(ShardSpec.replicated(f"{name}.weight", (hidden,)), "vector")

    def __call__(self, ops: Backend, x: Handle) -> Handle:
        return ops.norm(x, self.weight, self.eps)

    def after(self, ops: Backend, partial: Partial, residual: Handle) -> tuple[Handle, Handle]:
        """All-reduce + residual + norm in one operator: (normalized, new residual)."""
        return ops.reduce_add_norm(partial, residual, self.weight, self.eps)
