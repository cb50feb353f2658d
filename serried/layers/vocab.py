"""The two layers that are split over the vocabulary."""

from __future__ import annotations

from serried.backends.base import Backend, Handle
from serried.layers.layer import Layer
from serried.parallel.comm import Communicator
from serried.parallel.partition import Partition
from serried.weights.spec import Parameter, ShardSpec


class VocabParallelEmbedding(Layer):
    """Each rank holds a range of the vocabulary's rows; a token's embedding comes from the rank that owns its row.

    Out: float32 [T, hidden] on every rank. The owner's row is selected, not added to zeros (which would turn -0 to 0).
    """

    def __init__(self, name: str, vocab: Partition, hidden: int, comm: Communicator) -> None:
        self.comm = comm
        self.span = vocab.spans[comm.rank]
        self.weight = Parameter(ShardSpec.rows(f"{name}.weight", (vocab.size, hidden), self.span), "embedding")

    def __call__(self, ops: Backend) -> Handle:
        return ops.embed(self.weight, self.span, self.comm)


class ParallelLMHead(Layer):
    """Each rank computes the logits of its range of the vocabulary, for the rows that want logits only.

    tied_to: the embedding whose weight it shares. Out: float32 [Q, vocabulary], on rank 0, or (gather_to_all) on
    every rank.
    """

    def __init__(
        self,
        name: str,
        vocab: Partition,
        hidden: int,
        comm: Communicator,
        *,
        tied_to: VocabParallelEmbedding | None = None,
        gather_to_all: bool = False,
    ) -> None:
        self.comm = comm
        self.parts = vocab.sizes
        self.gather_to_all = gather_to_all
        self.weight = (
            tied_to.weight
            if tied_to
            else Parameter(ShardSpec.rows(f"{name}.weight", (vocab.size, hidden), vocab.spans[comm.rank]), "linear")
        )

    def __call__(self, ops: Backend, x: Handle) -> Handle:
        return ops.logits(ops.select_rows(x), self.weight, self.comm, self.parts, self.gather_to_all)
