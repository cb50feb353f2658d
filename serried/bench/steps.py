"""A bare engine for benchmarks: all ranks of one layout, and steps made by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serried.backends.step import StepInput
from serried.config import EngineConfig
from serried.engine.batch import build_step
from serried.engine.executor import Executor, create_executor
from serried.engine.request import Request
from serried.engine.scheduler import Scheduled
from serried.errors import InputError
from serried.models.config import ModelConfig
from serried.models.registry import ModelSource
from serried.sampling_params import SamplingParams


@dataclass(frozen=True)
class Layout:
    """A tensor-parallel size and the threads of each rank."""

    tp: int
    threads: int

    @classmethod
    def parse_all(cls, text: str) -> list[Layout]:
        """`1x2,2x1`: TP x threads, several with commas between them."""
        try:
            pairs = [part.split("x") for part in text.split(",")]
            return [cls(int(tp), int(threads)) for tp, threads in pairs]
        except ValueError:
            raise InputError(f"--layouts {text}: expected TP x threads, like 1x2,2x1") from None


class BenchEngine:
    """All ranks of one layout, and sequences whose steps can be run again and again.

    executor: one that is there already and idle, whose cache may be written over; else one is made.
    """

    def __init__(
        self, config: EngineConfig, source: ModelSource, sequences: int, length: int, executor: Executor | None = None
    ) -> None:
        self.executor: Executor = executor or create_executor(config, source)
        self.config = self.executor.config
        self.model: ModelConfig = source.config
        if length > self.executor.max_model_len:
            raise InputError(f"--context or --input-len {length}: at most {self.executor.max_model_len} here")
        pool = self.executor.new_pool()
        self.requests = []
        rng = np.random.default_rng(0)
        for i in range(sequences):
            blocks = pool.take(-(-(length + 1) // self.config.block_size))
            if blocks is None:
                raise InputError(
                    f"--batch-size {sequences} --context {length}: the KV cache holds {pool.blocks} blocks of "
                    f"{self.config.block_size} tokens; give more --kv-cache-memory"
                )
            prompt = [int(t) for t in rng.integers(0, min(1000, source.config.vocab_size), length)]
            request = Request(i, prompt, SamplingParams(temperature=0, ignore_eos=True), 0)
            request.blocks = blocks
            self.requests.append(request)

    def prefill(self) -> None:
        """Fill the cache with every sequence's prompt, within the token budget."""
        budget = self.config.max_num_batched_tokens
        for request in self.requests:
            for start in range(0, len(request.prompt), budget):
                stop = min(start + budget, len(request.prompt))
                self.executor.execute(self._step([Scheduled(request, start, stop)]))

    def decode_step(self) -> StepInput:
        """One token of every sequence, at its last position: the context stays what it is however often it runs."""
        return self._step([Scheduled(r, len(r.prompt) - 1, len(r.prompt)) for r in self.requests])

    def prefill_step(self) -> StepInput:
        """The whole prompt of the first sequence."""
        request = self.requests[0]
        return self._step([Scheduled(request, 0, len(request.prompt))])

    def _step(self, parts: Sequence[Scheduled]) -> StepInput:
        return build_step(parts, self.config.block_size)

    @property
    def weight_bytes(self) -> int:
        """Nominal bytes of weights that a step reads, as they were loaded: the largest rank's, times the ranks."""
        return self.config.tensor_parallel_size * max(rank.weight_bytes for rank in self.executor.ranks)

    @property
    def quantization(self) -> str:
        """What most of the weights are kept in, in the words of --quantization."""
        counts: Counter[str] = Counter()
        for parameter in self.executor.worker.model.parameters():
            counts[parameter.method.name if parameter.method else "none"] += parameter.elements
        return counts.most_common(1)[0][0].removesuffix("_min")

    @property
    def operands(self) -> str:
        """What its products multiply: int8 where weights are quantized, if the backend keeps them so."""
        quantized = self.quantization != "none" and self.config.backend == "native"
        return "int8" if quantized else self.config.dtype

    def kv_bytes(self, context: int) -> int:
        """Bytes of KV cache that a decode step reads: the largest rank's, times the ranks."""
        itemsize = 4 if self.config.dtype == "float32" else 2
        c = self.model
        kv = max(c.partition(self.config.weights).kv_columns.sizes)
        seen = c.positions_read(context - 1, context)
        return self.config.tensor_parallel_size * itemsize * 2 * kv * seen * len(self.requests)

    def close(self) -> None:
        self.executor.close()
