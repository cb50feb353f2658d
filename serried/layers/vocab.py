"""The two layers that are split over the vocabulary."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

from serried.backends.base import Backend, Handle
from serried.layers.layer import Layer
from serried.parallel.comm import Communicator
from serried.parallel.partition import Partition
from serried.weights.spec import Parameter, ShardSpec

Logits = npt.NDArray[np.float32]


class VocabParallelEmbedding(Layer):
    """Each rank holds a range of the vocabulary's rows; a token's embedding comes from the rank that owns its row.

    Out: float32 [T, hidden] on every rank. The owner's row is selected, not added to zeros (which would turn -0 to 0).
    scale: what the rows are multiplied with, once it has been rounded to the backend's dtype.
    """

    def __init__(self, name: str, vocab: Partition, hidden: int, comm: Communicator, scale: float = 1.0) -> None:
        self.comm = comm
        self.scale = scale
        self.span = vocab.spans[comm.rank]
        self.weight = Parameter(ShardSpec.rows(f"{name}.weight", (vocab.size, hidden), self.span), "embedding")

    def __call__(self, ops: Backend) -> Handle:
        dtype = np.float32 if ops.dtype == "float32" else ml_dtypes.bfloat16
        return ops.embed(self.weight, self.span, self.comm, float(dtype(self.scale)))


class ParallelLMHead(Layer):
    """Each rank computes the logits of its range of the vocabulary, for the rows that want logits only.

    tied_to: the embedding whose weight it shares. softcap: logits x become softcap * tanh(x / softcap) (0: they stay).
    Out: float32 [Q, own vocabulary]. Sampling needs no more, since each rank offers candidates of its own part;
    `gather` and `all_gather` make the whole vocabulary of it.
    """

    def __init__(
        self,
        name: str,
        vocab: Partition,
        hidden: int,
        comm: Communicator,
        *,
        tied_to: VocabParallelEmbedding | None = None,
        softcap: float = 0.0,
    ) -> None:
        self.softcap = softcap
        self.comm = comm
        self.span = vocab.spans[comm.rank]
        self.parts = vocab.sizes
        self.weight = (
            tied_to.weight
            if tied_to
            else Parameter(ShardSpec.rows(f"{name}.weight", (vocab.size, hidden), self.span), "head")
        )

    def __call__(self, ops: Backend, x: Handle) -> Handle:
        return ops.logits(ops.select_rows(x), self.weight, self.softcap)

    def gather(self, own: Logits) -> Logits | None:
        """The whole logits [Q, vocabulary] on rank 0, None on the others."""
        whole: Logits | None = self.comm.gather(own, self.parts, dim=1)
        return whole

    def all_gather(self, own: Logits) -> Logits:
        """The whole logits [Q, vocabulary] on every rank."""
        whole: Logits = self.comm.all_gather(own, self.parts, dim=1)
        return whole
