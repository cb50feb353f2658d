"""A rank of the tests of the layers: runs each layer by itself on its shard, and compares with plain torch.

Every rank makes the same whole weights and inputs from the same seeds, so each knows what has to come out.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

from serried.backends.step import StepInput
from serried.backends.torch import TorchBackend
from serried.kv.cache import CacheShape
from serried.layers.layer import Layer
from serried.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from serried.layers.vocab import ParallelLMHead, VocabParallelEmbedding
from serried.parallel.comm import Communicator
from serried.parallel.link import ChildLink
from serried.parallel.partition import ModelPartition, Partition, RowPartition
from serried.parallel.reduction import ReductionTree, Span
from serried.weights.checkpoint import TensorInfo
from serried.weights.load import load_parameters

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, TOKENS = 48, 9, 3, 32, 205, 333, 6


class MemoryCheckpoint:
    """A checkpoint in memory, which counts what is read of it."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.arrays = arrays
        self.tensors = {name: TensorInfo(a.shape, "F32", "memory") for name, a in arrays.items()}
        self.bytes_read = 0

    def read(self, name: str, rows: Span, columns: Span | None = None) -> Any:
        whole = self.arrays[name][rows.start : rows.stop]
        part = whole if columns is None else whole[:, columns.start : columns.stop]
        self.bytes_read += part.nbytes
        return part

    def close(self) -> None:
        pass


def values(name: str, *shape: int) -> Any:
    seed = sum(name.encode())
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights(**shapes: tuple[int, ...]) -> dict[str, Any]:
    """The whole tensors; `a__weight` stands for a.weight."""
    return {name.replace("__", "."): values(name, *shape) for name, shape in shapes.items()}


def backend_with(layer: Layer, arrays: Mapping[str, Any]) -> TorchBackend:
    """A backend, with the layer's shard of the weights loaded; of a split layer no more than the shard is read."""
    ops = TorchBackend("float32", threads=1)
    ops.allocate_cache(CacheShape(1, 1, 8, 1, 2, 4))
    checkpoint = MemoryCheckpoint(arrays)
    parameters = list(layer.parameters())
    load_parameters(parameters, checkpoint, ops)
    assert checkpoint.bytes_read == 4 * sum(parameter.elements for parameter in parameters)
    return ops


def partition(comm: Communicator, weighted: Sequence[int] | None = None) -> ModelPartition:
    return ModelPartition(HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, tuple(weighted or [1] * comm.size))


def close(got: Any, wanted: Any) -> None:
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-5)


def tensors(arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def step(tokens: Sequence[int], logit_rows: Sequence[int]) -> StepInput:
    def flat(x: Any) -> Any:
        return np.array(x, np.int32)

    own = range(len(tokens))
    return StepInput(
        tokens=flat(tokens),
        positions=flat(own),
        slots=flat(own),
        row_starts=flat([0, len(own)]),
        kv_lens=flat([len(own)]),
        block_starts=flat([0, 1]),
        blocks=flat([0]),
        logit_rows=flat(logit_rows),
        picks=flat([]),
        sampling=flat([]),
    )


def column_parallel(comm: Communicator) -> None:
    """Own outputs; all of them with gather_output; parts uneven, one of them empty."""
    arrays = weights(up__weight=(77, HIDDEN), up__bias=(77,))
    w, x = tensors(arrays), torch.from_numpy(values("x", TOKENS, HIDDEN))
    wanted = F.linear(x, w["up.weight"], w["up.bias"])
    for outputs in (Partition.split(77, 1, [1] * comm.size), empty_first(77, comm.size)):
        for gather in (False, True):
            layer = ColumnParallelLinear("up", HIDDEN, outputs, comm, bias=True, gather_output=gather)
            got = layer(backend_with(layer, arrays), x)
            span = outputs.spans[comm.rank]
            close(got, wanted if gather else wanted[:, span.start : span.stop])


def empty_first(size: int, ranks: int) -> Partition:
    edges = [0, 0, *(size * r // (ranks - 1) for r in range(1, ranks))]
    return Partition(size, tuple(Span(a, b) for a, b in pairwise(edges)))


def row_parallel(comm: Communicator) -> None:
    """From own inputs or from all; reduced or not; even and weighted splits; and the bias counts once."""
    arrays = weights(down__weight=(HIDDEN, 300), down__bias=(HIDDEN,))
    w, x = tensors(arrays), torch.from_numpy(values("x", TOKENS, 300))
    wanted = F.linear(x, w["down.weight"], w["down.bias"])
    for shares in ([1] * comm.size, list(range(1, comm.size + 1))):
        inputs = RowPartition.over(ReductionTree(300, 32), shares)
        span = inputs.spans[comm.rank]
        for parallel in (True, False):
            layer = RowParallelLinear(
                "down", inputs, HIDDEN, comm, bias=True, input_is_parallel=parallel, reduce_results=True
            )
            ops = backend_with(layer, arrays)
            mine = x[:, span.start : span.stop] if parallel else x
            got = layer(ops, mine)
            close(got, wanted)
            same_on_every_rank(comm, got)
            layer.reduce_results = False
            unreduced = layer(ops, mine)
            assert unreduced.nodes.shape == (TOKENS, inputs.plan.counts[comm.rank], HIDDEN)
            own = F.linear(x[:, span.start : span.stop], w["down.weight"][:, span.start : span.stop])
            close(unreduced.nodes.sum(1), own)  # no bias in it
            assert torch.equal(ops.reduce(unreduced), got)


def same_on_every_rank(comm: Communicator, x: torch.Tensor) -> None:
    everywhere = comm.all_gather(x.contiguous().unsqueeze(0), [1] * comm.size)
    assert all(torch.equal(everywhere[0], other) for other in everywhere)


def merged_column_parallel(comm: Communicator) -> None:
    """Gate and up, each split alike: a rank's output is its gate columns, then its up columns."""
    shapes = {f"{name}__{kind}": size for name in ("gate", "up") for kind, size in kinds(MLP)}
    arrays = weights(**shapes)
    w, x = tensors(arrays), torch.from_numpy(values("x", TOKENS, HIDDEN))
    columns = partition(comm).mlp
    layer = MergedColumnParallelLinear(("gate", "up"), HIDDEN, (columns, columns), comm, bias=True)
    span = columns.spans[comm.rank]
    wanted = [F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])[:, span.start : span.stop] for name in ("gate", "up")]
    close(layer(backend_with(layer, arrays), x), torch.cat(wanted, dim=1))


def kinds(outputs: int) -> list[tuple[str, tuple[int, ...]]]:
    return [("weight", (outputs, HIDDEN)), ("bias", (outputs,))]


def qkv_parallel(comm: Communicator) -> None:
    """Whole heads: a rank's query heads, and the KV heads that they read, which two ranks may share."""
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    arrays = weights(**{f"{name}__{kind}": shape for name, size in sizes.items() for kind, shape in kinds(size)})
    w, x = tensors(arrays), torch.from_numpy(values("x", TOKENS, HIDDEN))
    for shares in ([1] * comm.size, [5] + [2] * (comm.size - 1)):
        split = partition(comm, shares)
        layer = QKVParallelLinear(("q", "k", "v"), HIDDEN, split, comm, bias=True)
        got = layer(backend_with(layer, arrays), x).view(TOKENS, -1, HEAD_DIM)
        queries, kv = split.q_heads(comm.rank), split.kv_heads_of(comm.rank)
        wanted = []
        for name, heads in (("q", queries), ("k", kv), ("v", kv)):
            whole = F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"]).view(TOKENS, -1, HEAD_DIM)
            wanted.append(whole[:, heads.start : heads.stop])
        close(got, torch.cat(wanted, dim=1))
        read = [kv.start + local for local in split.kv_head_map(comm.rank)]
        assert read == [head // (HEADS // KV_HEADS) for head in range(queries.start, queries.stop)]


def embedding(comm: Communicator) -> None:
    """Rows of every rank, its first and last; to the bit, minus zero, tiny and huge values too."""
    arrays = weights(tok__weight=(VOCAB, HIDDEN))
    arrays["tok.weight"][:, :4] = [-0.0, 1e-42, -3.4e38, 0.0]
    vocab = partition(comm).vocab
    layer = VocabParallelEmbedding("tok", vocab, HIDDEN, comm)
    ops = backend_with(layer, arrays)
    edges = [i for span in vocab.spans for i in (span.start, span.stop - 1)]
    tokens = [*edges, 7, 7, VOCAB - 1]
    got = ops.run(layer, step(tokens, [0]))
    assert got is not None
    assert got.numpy().tobytes() == arrays["tok.weight"][tokens].tobytes()


def lm_head(comm: Communicator) -> None:
    """The rows that want logits: own vocabulary, all of it on rank 0, or everywhere; tied or not."""
    arrays = weights(head__weight=(VOCAB, HIDDEN))
    w, x = tensors(arrays), torch.from_numpy(values("x", TOKENS, HIDDEN))
    vocab, rows = partition(comm).vocab, [1, 4, 5]
    wanted, span = F.linear(x[rows], w["head.weight"]), vocab.spans[comm.rank]
    for table in (None, VocabParallelEmbedding("head", vocab, HIDDEN, comm)):
        layer = ParallelLMHead("head", vocab, HIDDEN, comm, tied_to=table)
        ops = backend_with(layer, arrays)
        own = ops.run(partial(layer, x=x), step(range(TOKENS), rows))
        close(own, wanted[:, span.start : span.stop])
        gathered = layer.gather(own.contiguous())
        assert (gathered is not None) == (comm.rank == 0)
        for whole in (gathered, layer.all_gather(own.contiguous())):
            if whole is not None:
                close(torch.as_tensor(whole), wanted)


def main() -> None:
    with ChildLink.from_argv() as link:
        from serried.parallel.torch_comm import TorchComm, anonymous_store

        store = anonymous_store(link.store_fd, link.size)
        comm = TorchComm(store, link.rank, link.size, timeout=30.0, loopback=True)
        link.ready()
        while True:
            check = msgspec.msgpack.decode(link.recv())
            try:
                globals()[check](comm)
                link.send(b"")
            except Exception:
                link.send(traceback.format_exc().encode())


if __name__ == "__main__":
    main()
