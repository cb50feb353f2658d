"""`serried bench throughput`: tokens a second of LLM.generate, and the share of the time that is not the ranks'."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from serried.backends.step import StepInput
from serried.bench.workload import Workload
from serried.config import EngineConfig
from serried.engine.executor import Executor
from serried.engine.llm import LLM
from serried.engine.worker import StepOutput
from serried.sampling_params import SamplingParams


class _Timed:
    """An executor that notes how long its steps take, and those that only decode."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.seconds = self.decode_seconds = 0.0
        self.decode_tokens = 0

    def execute(self, step: StepInput) -> StepOutput:
        start = time.perf_counter()
        output = self._executor.execute(step)
        seconds = time.perf_counter() - start
        self.seconds += seconds
        if step.tokens.size == step.requests:
            self.decode_seconds += seconds
            self.decode_tokens += step.requests
        return output


def bench_throughput(
    config: EngineConfig, workload: Workload, report: Callable[[int, int], None], rounds: int = 1
) -> dict[str, Any]:
    """All prompts at once through LLM.generate, `rounds` times; the figures of the fastest.

    tokens_per_s: output tokens. outside_steps_share: of the time, what was not spent in the ranks' steps: scheduling,
    making steps, taking tokens in.
    """
    options: dict[str, Any] = {**config.to_dict()}
    model = str(options.pop("model"))
    best: dict[str, Any] = {}
    with LLM(model, **options) as llm:
        params = SamplingParams(max_tokens=workload.output_len, temperature=0, ignore_eos=True)
        prompts = workload.prompts()
        for done in range(rounds):
            timed = llm.core.executor = _Timed(llm.executor)
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
                    "decode_tokens_per_s": timed.decode_tokens / timed.decode_seconds if timed.decode_tokens else None,
                    "outside_steps_share": max(0.0, 1 - timed.seconds / seconds),
                }
            llm.core.scheduler.pool.forget_all()  # the next round computes its prompts as this one did
            report(done + 1, rounds)
        tp, threads = llm.config.tensor_parallel_size, llm.config.threads
    return {"bench": "throughput", "tp": tp, "threads_per_rank": threads, "dtype": config.dtype, **best}
