"""RMSNorm, alone or fused with the reduction before it."""

from __future__ import annotations

from serried.backends.base import Backend, Handle, Partial
from serried.layers.layer import Layer
from serried.weights.spec import Parameter, ShardSpec


class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + eps) * weight over the float32 residual stream; every rank holds the whole weight.

    offset: what is added to the checkpoint's values to make the weight.
    """

    def __init__(self, name: str, hidden: int, eps: float, offset: float = 0.0) -> None:
        self.eps = eps
        self.weight = Parameter(ShardSpec.replicated(f"{name}.weight", (hidden,)), "vector", offset)

    def __call__(self, ops: Backend, x: Handle) -> Handle:
        return ops.norm(x, self.weight, self.eps)

    def after(
        self, ops: Backend, partial: Partial, residual: Handle, inner: RMSNorm | None = None
    ) -> tuple[Handle, Handle]:
        """All-reduce + residual + norm in one operator: (normalized, new residual).

        inner: a norm of the reduced output, before it is added to the residual; its eps is this norm's.
        """
        return ops.reduce_add_norm(partial, residual, self.weight, self.eps, inner.weight if inner else None)
