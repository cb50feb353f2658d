"""The gated MLP, split over its intermediate columns."""

from __future__ import annotations

from collections.abc import Sequence

from serried.backends.base import Backend, Handle, Partial
from serried.layers.layer import Layer
from serried.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from serried.parallel.comm import Communicator
from serried.parallel.partition import RowPartition


class GatedMLP(Layer):
    """down(activation(gate(x)) * up(x)): gate, up column parallel, down row parallel: one reduction, left to fuse.

    gate_up: the checkpoint's tensors, one for each, or one that holds both.
    """

    def __init__(
        self,
        gate_up: Sequence[str],
        down: str,
        hidden: int,
        columns: RowPartition,
        comm: Communicator,
        *,
        activation: str,
        bias: bool,
    ) -> None:
        self.activation = activation
        self.gate_up_proj = MergedColumnParallelLinear(gate_up, hidden, (columns, columns), comm, bias=bias)
        self.down_proj = RowParallelLinear(down, columns, hidden, comm, bias=bias, reduce_results=False)

    def __call__(self, ops: Backend, h: Handle) -> Partial:
        gate_up = self.gate_up_proj(ops, h)
        return self.down_proj.partial(ops, ops.gated_activation(gate_up, self.activation))
