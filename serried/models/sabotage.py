"""Damage one rank on purpose, so that `verify` can show that it would notice.

Each kind is a mistake that has been made in earnest. They act on the built model; the engine has no code for them.
"""

from __future__ import annotations

from dataclasses import replace

from serried.backends.base import Backend, Handle, Partial
from serried.layers.linear import RowParallelLinear
from serried.models.config import ModelConfig
from serried.models.decoder import Decoder
from serried.parallel.partition import ModelPartition
from serried.parallel.reduction import Adds, ReductionPlan
from serried.weights.spec import Parameter, Piece, ShardSpec


def why_not(kind: str, config: ModelConfig, partition: ModelPartition) -> str | None:
    """Why a split of this model does not have what a sabotage damages; None where it has."""
    if partition.ranks == 1:
        return "needs two ranks or more"
    if kind == "double-bias" and not (config.attention_output_bias or config.mlp_bias):
        return "the model has no bias on a row-parallel linear"
    plans = (partition.attention.plan, partition.mlp.plan)
    if kind == "rank-order" and all(in_rank_order(plan).across == plan.across for plan in plans):
        return "two nodes can be added in one order only; try -tp 3"
    return None


def damage_layers(model: Decoder, kind: str, rank: int) -> None:
    """Before loading: change what the row-parallel linears of this rank load or do."""
    for layer in model.layers:
        for linear in (layer.attention.o_proj, layer.mlp.down_proj):
            if kind == "rank-order":
                linear.plan = in_rank_order(linear.plan)
            elif kind == "skip-reduce":
                linear.plan = only_own(linear.plan, rank)
            elif kind == "swap-shards":
                linear.weight.spec = neighbours(linear.weight.spec)
        if kind == "activation-first":
            layer.mlp.down_proj = ActivationFirst(layer.mlp.down_proj, layer.mlp.activation)


def damage_values(model: Decoder, kind: str) -> None:
    """After loading: `double-bias` adds the biases of row-parallel linears twice."""
    if kind == "double-bias":
        for layer in model.layers:
            for bias in (layer.attention.o_proj.bias, layer.mlp.down_proj.bias):
                if bias is not None:
                    bias.value = bias.value + bias.value


def in_rank_order(plan: ReductionPlan) -> ReductionPlan:
    """The plan of an engine that adds what the ranks bring one after the other."""
    return replace(plan, across=Adds(tuple((0, i) for i in range(1, sum(plan.counts))), (0,)))


def only_own(plan: ReductionPlan, rank: int) -> ReductionPlan:
    """The plan of a rank that takes its own partial sum for the result."""
    if not plan.counts[rank]:
        return plan
    first = sum(plan.counts[:rank])
    own = range(first + 1, first + plan.counts[rank])
    return replace(plan, across=Adds(tuple((first, i) for i in own), (first,)))


def neighbours(spec: ShardSpec) -> ShardSpec:
    """A shard of the same size that is another rank's: the columns just before."""

    def swapped(piece: Piece) -> Piece:
        if piece.columns is None:
            return piece
        return replace(piece, columns=piece.columns.shift(-min(piece.columns.start, piece.columns.size)))

    return ShardSpec(tuple(swapped(piece) for piece in spec.pieces))


class ActivationFirst(RowParallelLinear):
    """A row-parallel linear that applies the activation to its partial sums, before the reduction."""

    def __init__(self, linear: RowParallelLinear, activation: str) -> None:
        vars(self).update(vars(linear))
        self.activation = activation
        self.weight: Parameter = linear.weight

    def partial(self, ops: Backend, x: Handle) -> Partial:
        partial = super().partial(ops, x)
        return replace(partial, nodes=ops.activation(partial.nodes, self.activation))
