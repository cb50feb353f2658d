"""Self-attention, split by heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serried.backends.base import AttentionSpec, Backend, Handle, Partial, RopeTable
from serried.layers.layer import Layer
from serried.layers.linear import QKVParallelLinear, RowParallelLinear
from serried.parallel.comm import Communicator
from serried.parallel.partition import ModelPartition
from serried.weights.spec import Parameter, ShardSpec


@dataclass(frozen=True)
class AttentionNames:
    """Checkpoint names of one layer's attention; the norms are None where the family has no QK-Norm.

    qkv_proj: of q, k and v, or of the one tensor that holds all three.
    """

    qkv_proj: Sequence[str]
    o_proj: str
    q_norm: str | None
    k_norm: str | None


@dataclass(frozen=True)
class AttentionKind:
    """What attention computes, apart from its sizes; see AttentionSpec for the terms.

    norm_offset: what is added to the checkpoint's values to make the weights of the norms.
    """

    rotary_dim: int
    scale: float
    norm_eps: float
    norm_offset: float
    window: int
    softcap: float


class Attention(Layer):
    """q, k and v column parallel, whole heads; o row parallel: one reduction, left to the caller to fuse."""

    def __init__(
        self,
        names: AttentionNames,
        layer: int,
        hidden: int,
        partition: ModelPartition,
        comm: Communicator,
        kind: AttentionKind,
        *,
        qkv_bias: bool,
        output_bias: bool,
    ) -> None:
        head_dim, rank = partition.head_dim, comm.rank
        self.qkv_proj = QKVParallelLinear(names.qkv_proj, hidden, partition, comm, bias=qkv_bias)
        self.q_norm = _head_norm(names.q_norm, head_dim, kind.norm_offset)
        self.k_norm = _head_norm(names.k_norm, head_dim, kind.norm_offset)
        self.o_proj = RowParallelLinear(
            names.o_proj, partition.attention, hidden, comm, bias=output_bias, reduce_results=False
        )
        self.spec = AttentionSpec(
            layer=layer,
            query_heads=partition.q_heads(rank).size,
            kv_heads=partition.kv_heads_of(rank).size,
            kv_map=tuple(partition.kv_head_map(rank)),
            head_dim=head_dim,
            rotary_dim=kind.rotary_dim,
            scale=kind.scale,
            norm_eps=kind.norm_eps,
            window=kind.window,
            softcap=kind.softcap,
        )

    def __call__(self, ops: Backend, h: Handle, rope: RopeTable) -> Partial:
        qkv = self.qkv_proj(ops, h)
        a = ops.attention(qkv, self.spec, rope, self.q_norm, self.k_norm)
        return self.o_proj.partial(ops, a)


def _head_norm(name: str | None, head_dim: int, offset: float) -> Parameter | None:
    return Parameter(ShardSpec.replicated(f"{name}.weight", (head_dim,)), "vector", offset) if name else None
