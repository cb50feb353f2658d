"""Linear layers split over the ranks of a group, under the names that Megatron-LM and vLLM gave them.

A weight is [outputs, inputs], as in PyTorch. Column parallel: each rank owns some outputs and needs the whole input;
no communication. Row parallel: each rank owns some inputs, and its outputs are partial sums that must be reduced. A
column-parallel layer's output is just the input that a row-parallel layer wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from serried.backends.base import Backend, Handle, Partial
from serried.layers.layer import Layer
from serried.parallel.comm import Communicator
from serried.parallel.partition import ModelPartition, Partition, RowPartition
from serried.parallel.reduction import Span
from serried.weights.spec import Parameter, ShardSpec


class ColumnParallelLinear(Layer):
    """Each rank computes a range of the outputs: [T, inputs] -> [T, own outputs].

    gather_output: all-gather, so that every rank has all outputs.
    """

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: Partition,
        comm: Communicator,
        *,
        bias: bool = False,
        gather_output: bool = False,
    ) -> None:
        self._init_fused([name], [outputs], inputs, comm, bias)
        self.parts = outputs.sizes
        self.gather_output = gather_output

    def _init_fused(
        self, names: Sequence[str], parts: Sequence[Partition], inputs: int, comm: Communicator, bias: bool
    ) -> None:
        """One weight out of several parts: this rank's rows of each, one below the other."""
        self.comm = comm
        self.gather_output = False
        sources = _sources(names, parts, comm.rank)
        self.weight = Parameter(
            ShardSpec.stacked([ShardSpec.rows(f"{name}.weight", (size, inputs), rows) for name, size, rows in sources]),
            "linear",
        )
        self.bias = (
            Parameter(
                ShardSpec.stacked([ShardSpec.rows(f"{name}.bias", (size,), rows) for name, size, rows in sources]),
                "vector",
            )
            if bias
            else None
        )

    def __call__(self, ops: Backend, x: Handle) -> Handle:
        y = ops.linear(x, self.weight, self.bias)
        return ops.all_gather_columns(y, self.comm, self.parts) if self.gather_output else y


def _sources(names: Sequence[str], parts: Sequence[Partition], rank: int) -> list[tuple[str, int, Span]]:
    """For each part its tensor, that tensor's rows in all, and a rank's rows of it.

    names: a tensor for each part, or one tensor that holds all parts, one below the other.
    """
    if len(names) == len(parts):
        return [(name, part.size, part.spans[rank]) for name, part in zip(names, parts, strict=True)]
    (name,) = names
    *starts, total = accumulate((part.size for part in parts), initial=0)
    return [(name, total, part.spans[rank].shift(start)) for part, start in zip(parts, starts, strict=True)]


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel linears of one input in one product (gate and up): [T, own gate | own up].

    names: of the checkpoint's tensors, one for each, or one that holds all of them.
    """

    def __init__(
        self,
        names: Sequence[str],
        inputs: int,
        outputs: Sequence[Partition],
        comm: Communicator,
        *,
        bias: bool = False,
    ) -> None:
        self._init_fused(names, outputs, inputs, comm, bias)


class QKVParallelLinear(ColumnParallelLinear):
    """q, k and v in one product, split by heads: [T, own q heads | own k heads | own v heads].

    A rank holds the KV heads that its query heads read; ranks that read the same one each hold a copy. names: of the
    checkpoint's tensors, one for each of q, k and v, or one that holds all three.
    """

    def __init__(
        self,
        names: Sequence[str],
        inputs: int,
        partition: ModelPartition,
        comm: Communicator,
        *,
        bias: bool = False,
    ) -> None:
        kv = partition.kv_columns
        self._init_fused(names, (partition.attention, kv, kv), inputs, comm, bias)


class RowParallelLinear(Layer):
    """Each rank multiplies a range of the inputs; the partial sums are folded in the order of the reduction tree.

    input_is_parallel: x holds this rank's inputs only (else: all of them, of which it takes its own).
    reduce_results: return the reduced float32 [T, outputs]; else a Partial, for a fused reduction later.
    The bias, which every rank holds, is added once, after the fold.
    """

    def __init__(
        self,
        name: str,
        inputs: RowPartition,
        outputs: int,
        comm: Communicator,
        *,
        bias: bool = False,
        input_is_parallel: bool = True,
        reduce_results: bool = True,
    ) -> None:
        self.comm = comm
        self.plan = inputs.plan
        self.span: Span = inputs.spans[comm.rank]
        self.input_is_parallel = input_is_parallel
        self.reduce_results = reduce_results
        self.weight = Parameter(ShardSpec.columns(f"{name}.weight", (outputs, inputs.size), self.span), "linear")
        self.bias = Parameter(ShardSpec.replicated(f"{name}.bias", (outputs,)), "vector") if bias else None

    def __call__(self, ops: Backend, x: Handle) -> Handle:
        partial = self.partial(ops, x)
        return ops.reduce(partial) if self.reduce_results else partial

    def partial(self, ops: Backend, x: Handle) -> Partial:
        """The unreduced result."""
        if not self.input_is_parallel:
            x = ops.columns(x, self.span)
        nodes = ops.linear_nodes(x, self.weight, self.plan, self.comm.rank)
        return Partial(nodes, self.weight.shape[0], self.plan, self.comm, self.bias)
