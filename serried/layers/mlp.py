"""The gated MLP, split over its intermediate columns."""

from __future__ import annotations

from serried.backends.base import Backend, Handle, Partial
from serried.layers.layer import Layer
from serried.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from serried.parallel.comm import Communicator
from serried.parallel.partition import RowPartition


class GatedMLP(Layer):
    """down(activation(gate(x)) * up(x)): gate, up column parallel, down row parallel: one reduction, left to fuse."""

    def __init__(
        self,
        names: tuple[str, str, str],
        hidden: int,
        columns: RowPartition,
        comm: Communicator,
        *,
        activation: str,
        bias: bool,
    ) -> None:
        gate, up, down = names
        self.activation = activation
        self.gate_up_proj = MergedColumnParallelLinear((gate, up), hidden, (columns, columns), comm, bias=bias)
        self.down_proj = RowParallelLinear(down, columns, hidden, comm, bias=bias, reduce_results=False)

    def __call__(self, ops: Backend, h: Handle) -> Partial:
        gate_up = self.gate_up_proj(ops, h)
        return self.down_proj.partial(ops, ops.gated_activation(gate_up, self.activation))
