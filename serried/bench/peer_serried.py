"""`python -m serried.bench.peer_serried`: Serried as a peer. Every step is built, run on all ranks and sampled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from serried import __version__
from serried.bench.peer import About, Setup, Task, serve
from serried.engine.batch import build_step
from serried.engine.executor import create_executor
from serried.engine.request import Request
from serried.engine.scheduler import Scheduled
from serried.engine.worker import StepOutput
from serried.errors import InputError
from serried.machine import peak_rss_bytes
from serried.models.registry import open_model
from serried.sampling_params import SamplingParams


class SerriedEngine:
    """The ranks that the config asks for, and the sequences of the task at hand. Tokens are chosen greedily."""

    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        start = time.perf_counter()
        source = open_model(setup.path)
        self.executor = create_executor(setup.config, source)
        stack.callback(self.executor.close)
        self._block_size = self.executor.config.block_size
        self._vocab_size = source.config.vocab_size
        isa = self.executor.worker.backend.isa
        self.about = About(__version__, isa, time.perf_counter() - start, peak_rss_bytes() / (1 << 20))

    def prepare(self, task: Task) -> None:
        self.task = task
        self.requests = self._sequences(task.sequences, task.context + task.tokens, task.positions)
        budget = self.executor.config.max_num_batched_tokens
        for request in self.requests:
            for start in range(0, task.context, budget):
                self._step([Scheduled(request, start, min(start + budget, task.context))])

    def run(self) -> float:
        task = self.task
        for request in self.requests:
            request.output.clear()
        start = time.perf_counter()
        for i in range(task.steps):
            at = task.context + i * task.tokens
            output = self._step([Scheduled(request, at, request.length) for request in self.requests])
            for request, token in zip(self.requests, output.tokens, strict=True):
                request.append(token)
        return time.perf_counter() - start

    def logits(self, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
        (request,) = self._sequences(1, len(prompt), len(prompt))
        request.prompt = list(prompt)
        if len(prompt) > 1:
            self._step([Scheduled(request, 0, len(prompt) - 1)])
        whole = self._step([Scheduled(request, len(prompt) - 1, len(prompt))], whole_logits=True).logits
        return whole.reshape(-1)

    def _sequences(self, count: int, prompt: int, positions: int) -> list[Request]:
        """Sequences with prompts of low ids, and blocks for so many positions each."""
        pool = self.executor.new_pool()
        rng = np.random.default_rng(0)
        made = []
        for i in range(count):
            ids = [int(t) for t in rng.integers(0, min(1000, self._vocab_size), prompt)]
            request = Request(i, ids, SamplingParams(temperature=0, max_tokens=positions, ignore_eos=True), 0)
            blocks = pool.take(-(-positions // self._block_size))
            if blocks is None:
                raise InputError(
                    f"the KV cache holds {pool.blocks} blocks of {self._block_size} tokens, too few for {count} "
                    f"sequences of {positions}; give more --kv-cache-memory"
                )
            request.blocks = blocks
            made.append(request)
        return made

    def _step(self, parts: Sequence[Scheduled], *, whole_logits: bool = False) -> StepOutput:
        return self.executor.execute(build_step(parts, self._block_size, whole_logits=whole_logits))


if __name__ == "__main__":
    serve(SerriedEngine)
