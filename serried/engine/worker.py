"""Worker: one rank. It holds a shard of the model and of the KV cache, and executes steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from serried.backends.picks import PICK_WORDS
from serried.backends.registry import create_backend
from serried.backends.step import StepInput
from serried.config import EngineConfig
from serried.engine.choice import choose_tokens
from serried.engine.footprint import CACHE_SHARE
from serried.engine.interface import TokenLogprobs
from serried.engine.logprobs import score_tokens
from serried.engine.wants import unpack_wants
from serried.errors import InputError
from serried.kv.cache import CacheShape
from serried.machine import available_memory, peak_rss_bytes
from serried.models.decoder import Decoder
from serried.models.registry import ModelSource
from serried.models.sabotage import damage_layers, damage_values
from serried.parallel.comm import Communicator
from serried.weights.load import Progress, describe_methods, load_parameters

log = logging.getLogger(__name__)

DEFAULT_SEQUENCES = 8  # a default cache holds at most so many sequences of the longest kind


@dataclass(frozen=True)
class RankInfo:
    """What one rank holds: its parameters (elements), its heads, its most memory (bytes) up to the end of loading.

    weight_bytes: nominal bytes of the weights that a step reads, in the formats that they were loaded in.
    """

    parameters: int
    query_heads: int
    kv_heads: int
    peak_rss_bytes: int
    weight_bytes: int


class RankTimes(NamedTuple):
    """Seconds that a rank has computed, and that it has spent in collectives (waiting for others included)."""

    compute: float
    collective: float


@dataclass(frozen=True)
class StepOutput:
    """What rank 0 has of a step.

    tokens: of each row that samples (NO_TOKEN where none may be chosen). logprobs: of each row that wants them.
    logits: [Q, vocabulary], where they alone are wanted.
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    logits: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))


class Worker:
    """One rank of a model: loads its shard, then turns steps into logits."""

    def __init__(
        self, config: EngineConfig, source: ModelSource, comm: Communicator, progress: Progress | None = None
    ) -> None:
        self.config = config
        self.comm = comm
        self.max_model_len = config.max_model_len or source.config.max_position
        if self.max_model_len > source.config.max_position:
            raise InputError(
                f"--max-model-len {self.max_model_len}: the model's context is {source.config.max_position}"
            )
        self.backend = create_backend(config, comm)
        partition = source.config.partition(config.weights)
        self.model = Decoder(source.config, partition, comm, self.max_model_len)
        damaged = config.sabotage if 0 < comm.rank == comm.size - 1 else None  # a group of one stays whole
        if damaged:
            damage_layers(self.model, damaged, comm.rank)
        self._load(source, progress)
        if damaged:
            damage_values(self.model, damaged)
        self.info = self._gather_info(partition.q_heads(comm.rank).size, partition.kv_heads_of(comm.rank).size)
        self.cache = self._make_cache(source, partition.kv_heads_of(comm.rank).size)
        self.program = self.backend.compile(self.model.forward)
        self._executing = 0.0  # seconds
        comm.counters.reset()

    def execute(self, step: StepInput) -> StepOutput | None:
        """Run one step: the tokens that are decided (or the logits) on rank 0, None on the others."""
        start = time.perf_counter()
        try:
            return self._execute(step)
        finally:
            self._executing += time.perf_counter() - start

    def _execute(self, step: StepInput) -> StepOutput | None:
        first = self.model.lm_head.span.start
        if step.sampling.size == 0 and step.picks.size == PICK_WORDS * step.logit_rows.size:
            chosen = self.program.choose(step, first, self.comm)
            return None if chosen is None else StepOutput(tokens=chosen)
        own = self.program.run(step)
        if step.sampling.size == 0:
            logits = self.model.lm_head.gather(np.ascontiguousarray(own))
            return None if logits is None else StepOutput(logits=logits)
        wants = unpack_wants(step.sampling)
        tokens = choose_tokens(self.program, own, first, wants, self.comm)
        logprobs = score_tokens(self.program, own, first, wants, tokens, self.comm)
        return None if tokens is None or logprobs is None else StepOutput(tokens=tokens, logprobs=logprobs)

    def gather_times(self) -> list[RankTimes] | None:
        """What each rank has done with its time since it was made, on rank 0; None on the others."""
        own = np.array([[int(1e9 * seconds) for seconds in self._times()]], np.int64)
        rows: Any = self.comm.gather(own, [1] * self.comm.size)
        return None if rows is None else [RankTimes(*(ns / 1e9 for ns in row)) for row in rows.tolist()]

    def _times(self) -> RankTimes:
        """By the program's own clock where it has one (the native one's stands still between steps)."""
        native = getattr(self.program, "native", None)
        collective = self.comm.counters.seconds
        if native is None:
            return RankTimes(max(0.0, self._executing - collective), collective)
        _, inside, *met = (ns * 1e-9 for ns in native.times())
        return RankTimes(max(0.0, inside - sum(met)), max(collective, sum(met)))

    @property
    def weight_bytes_per_step(self) -> int:
        """Nominal bytes of this rank's weights that a step reads, but for an embedding that is only looked up."""
        looked_up = None if self.model.config.tied else self.model.embedding.weight
        read = [p for p in self.model.parameters() if p is not looked_up and p.kind != "vector"]
        return round(sum(parameter.nominal_bytes(self.config.dtype) for parameter in read))

    def _load(self, source: ModelSource, progress: Progress | None) -> None:
        parameters = list(self.model.parameters())
        checkpoint = source.checkpoint(parameters, self.config.load_format, self.config.seed)
        try:
            load_parameters(
                parameters,
                checkpoint,
                self.backend,
                quantization=self.config.quantization,
                ignored=source.ignores,
                progress=progress,
            )
            summary = describe_methods(parameters, checkpoint, self.config.dtype)
        finally:
            checkpoint.close()
        if summary and self.comm.rank == 0:
            log.info("%s: %s", source.name, summary)
        self.model.place_constants(self.backend)

    def _gather_info(self, query_heads: int, kv_heads: int) -> list[RankInfo]:
        """What every rank holds, on every rank."""
        elements = sum(parameter.elements for parameter in self.model.parameters())
        held = [elements, query_heads, kv_heads, peak_rss_bytes(), self.weight_bytes_per_step]
        own = np.array([held], np.int64)
        rows: Any = self.comm.all_gather(own, [1] * self.comm.size)
        return [RankInfo(*map(int, row)) for row in rows]

    def _make_cache(self, source: ModelSource, kv_heads: int) -> CacheShape:
        """Allocate the KV cache: as many blocks as the smallest rank can hold, the same number on every rank."""
        size = self.config.block_size
        itemsize = 4 if self.config.dtype == "float32" else 2
        model = source.config
        one = CacheShape(model.num_layers, 1, size, kv_heads, model.head_dim, itemsize)
        given = self.config.kv_cache_memory
        memory = given or int(available_memory() * CACHE_SHARE) // self.comm.size
        per_sequence = -(-self.max_model_len // size)
        fitting = memory // one.bytes_per_block
        wanted = fitting if given else min(fitting, per_sequence * min(self.config.max_num_seqs, DEFAULT_SEQUENCES))
        blocks = int(min(self.comm.all_gather(np.array([wanted], np.int64), [1] * self.comm.size)))
        if blocks < 1:
            raise InputError(
                f"--kv-cache-memory {memory}: too small for one block of {size} tokens, {one.bytes_per_block} bytes"
            )
        self.max_model_len = min(self.max_model_len, blocks * size)
        shape = CacheShape(model.num_layers, blocks, size, kv_heads, model.head_dim, itemsize)
        self.backend.allocate_cache(shape)
        return shape
