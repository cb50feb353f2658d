"""`serried bench throughput`: tokens a second of LLM.generate, beside what the bare ranks reach."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from serried.backends.step import StepInput
from serried.bench.limits import median
from serried.bench.steps import BenchEngine
from serried.bench.workload import Workload
from serried.config import EngineConfig
from serried.engine.executor import Executor
from serried.engine.llm import LLM
from serried.engine.worker import StepOutput
from serried.sampling_params import SamplingParams

BARE_STEPS = 20


class _Timed:
    """An executor that notes how long its steps take, and when the steps were in which all requests decoded."""

    def __init__(self, executor: Executor, requests: int) -> None:
        self._executor, self._requests = executor, requests
        self.seconds = 0.0
        self._begun = self._ended = 0.0  # of the stretch of whole decode steps
        self._decoded = 0

    def execute(self, step: StepInput) -> StepOutput:
        start = time.perf_counter()
        output = self._executor.execute(step)
        end = time.perf_counter()
        self.seconds += end - start
        if step.tokens.size == step.requests == self._requests:
            self._begun = self._begun or start
            self._ended, self._decoded = end, self._decoded + step.requests
        return output

    @property
    def decode_tokens_per_s(self) -> float | None:
        """By the clock on the wall, from the first to the last step in which all requests decoded."""
        return self._decoded / (self._ended - self._begun) if self._decoded else None


def bench_throughput(
    config: EngineConfig, workload: Workload, report: Callable[[int, int], None], rounds: int = 1
) -> dict[str, Any]:
    """All prompts at once through LLM.generate, `rounds` times; the figures of the fastest.

    tokens_per_s: output tokens, over the time of prompts and answers. decode_tokens_per_s: while all requests decode,
    everything between their steps included; bare_tokens_per_s: of the ranks alone, at the middle of the answers.
    outside_steps_share: of the time, what was not spent in the ranks' steps: scheduling, making steps, taking tokens
    in.
    """
    options: dict[str, Any] = {**config.to_dict()}
    model = str(options.pop("model"))
    best: dict[str, Any] = {}
    with LLM(model, **options) as llm:
        params = SamplingParams(max_tokens=workload.output_len, temperature=0, ignore_eos=True)
        prompts = workload.prompts()
        for done in range(rounds):
            timed = llm.core.executor = _Timed(llm.executor, workload.requests)
            start = time.perf_counter()
            for _ in llm.stream(prompts, params):
                pass
            seconds = time.perf_counter() - start
            output = workload.requests * workload.output_len
            if not best or output / seconds > best["tokens_per_s"]:
                best = {
                    "requests": workload.requests,
                    "input_len": workload.input_len,
                    "output_len": workload.output_len,
                    "tokens_per_s": output / seconds,
                    "total_tokens_per_s": (output + workload.requests * workload.input_len) / seconds,
                    "requests_per_s": workload.requests / seconds,
                    "decode_tokens_per_s": timed.decode_tokens_per_s,
                    "outside_steps_share": max(0.0, 1 - timed.seconds / seconds),
                }
            llm.core.scheduler.pool.forget_all()  # the next round computes its prompts as this one did
            report(done + 1, rounds)
        bare = _bare(llm, workload) if best["decode_tokens_per_s"] else None
        tp, threads = llm.config.tensor_parallel_size, llm.config.threads
    fraction = best["decode_tokens_per_s"] / bare if bare else None
    figures = {**best, "bare_tokens_per_s": bare, "fraction_of_bare": fraction}
    return {"bench": "throughput", "tp": tp, "threads_per_rank": threads, "dtype": config.dtype, **figures}


def _bare(llm: LLM, workload: Workload) -> float:
    """Tokens a second of decode steps of all requests, with nothing around them."""
    context = workload.input_len + workload.output_len // 2
    ranks = BenchEngine(llm.config, llm.source, workload.requests, context, llm.executor)
    ranks.prefill()
    step = ranks.decode_step()
    seconds = []
    for _ in range(BARE_STEPS):
        start = time.perf_counter()
        llm.executor.execute(step)
        seconds.append(time.perf_counter() - start)
    return workload.requests / median(seconds)
