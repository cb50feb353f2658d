"""`serried bench decode` and `prefill`: whole steps, as fractions of what the hardware allows, measured in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from serried.backends.step import StepInput
from serried.bench.limits import Limits, median
from serried.bench.steps import BenchEngine, Layout
from serried.config import EngineConfig
from serried.engine.executor import Executor
from serried.models.config import ModelConfig
from serried.models.registry import ModelSource

STEPS = 8  # between two looks at the limit
WARM_UP = 3

Report = Callable[[int, int], None]


@dataclass
class Samples:
    """One layout's measurements, a value a round."""

    seconds: list[float] = field(default_factory=list)  # of a step
    limit_seconds: list[float] = field(default_factory=list)  # that the limit allows it
    read: list[float] = field(default_factory=list)
    multiply: list[float] = field(default_factory=list)
    own_multiply: list[float] = field(default_factory=list)
    collective: list[float] = field(default_factory=list)  # shares of a step
    wait: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)


@dataclass
class Work:
    """What a step has to do: bytes to read, operations to make."""

    bytes: float
    flops: float


def measure(
    engines: Sequence[BenchEngine],
    steps: Sequence[StepInput],
    works: Sequence[Work],
    limits: Sequence[Limits],
    rounds: int,
    report: Report,
    count: int = STEPS,
) -> list[Samples]:
    """Run the layouts in turn, the limit before and after each; a round gives each layout one value of everything."""
    samples = [Samples() for _ in engines]
    for engine, step in zip(engines, steps, strict=True):
        for _ in range(WARM_UP):
            engine.executor.execute(step)
    for done in range(rounds):
        for engine, step, work, limit, sample in zip(engines, steps, works, limits, samples, strict=True):
            before = limit.read()
            _run(engine.executor, step, count, sample)
            sample.read.append((before + limit.read()) / 2)
            sample.multiply.append(limit.multiply())
            sample.own_multiply.append(limit.own_multiply())
            sample.limit_seconds.append(max(work.bytes / sample.read[-1], work.flops / sample.multiply[-1]))
        report(done + 1, rounds)
    return samples


def _run(executor: Executor, step: StepInput, count: int, sample: Samples) -> None:
    """`count` steps; the median second, and the shares of all of them together.

    One more comes before them, for the measuring of the limit has put ranks to sleep and their code out of the caches.
    """
    executor.execute(step)
    probe = _Probe(executor)
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        executor.execute(step)
        seconds.append(time.perf_counter() - start)
    total = sum(seconds)
    in_program, wait, collective = probe.seconds()
    sample.seconds.append(median(seconds))
    sample.outside.append(max(0.0, 1 - in_program / total))
    sample.wait.append(wait / total)
    sample.collective.append(collective / total)


class _Probe:
    """Time inside the program and its collectives, since it was made. The torch backend has no program of its own."""

    def __init__(self, executor: Executor) -> None:
        self._program = getattr(executor.worker.program, "native", None)
        self._comm = executor.worker.comm
        self._counters = executor.counters
        self._before = self._read()

    def _read(self) -> tuple[float, float, float]:
        """Seconds in the program or in collectives around it; waiting for the last rank; in collectives after that."""
        _, inside, *met = self._program.times() if self._program else (0, 0, 0)
        timings = self._comm.timings().values() if hasattr(self._comm, "timings") else ()
        wait = sum(t.wait_s for t in timings)
        whole = sum(t.total_s for t in timings) if timings else self._counters.seconds
        around = max(0.0, whole - sum(met) * 1e-9)
        return inside * 1e-9 + around, wait, whole - wait

    def seconds(self) -> tuple[float, float, float]:
        now = self._read()
        inside, wait, collective = (b - a for a, b in zip(self._before, now, strict=True))
        return inside, wait, collective


def bench_decode(
    source: ModelSource,
    config: EngineConfig,
    layouts: Sequence[Layout],
    batch_size: int,
    context: int,
    rounds: int,
    report: Report,
) -> list[dict[str, Any]]:
    """Decode steps of a batch at a context length, for each layout; the fields that docs/benchmarks.md explains."""
    config = config.resolve(max_num_batched_tokens=max(batch_size, config.max_num_batched_tokens))
    engines = [_engine(source, config, layout, batch_size, context) for layout in layouts]
    try:
        for engine in engines:
            engine.prefill()
        works = [
            Work(e.weight_bytes + e.kv_bytes(context), decode_flops(source.config, batch_size, context))
            for e in engines
        ]
        limits = [Limits(e.config.tensor_parallel_size * e.config.threads, e.operands) for e in engines]
        steps = [engine.decode_step() for engine in engines]
        samples = measure(engines, steps, works, limits, rounds, report)
        return [
            {
                **_head(engine, layout),
                "batch_size": batch_size,
                "context": context,
                "tokens_per_s": batch_size / median(s.seconds),
                "ms_per_step": median(s.seconds) * 1e3,
                "bytes_per_step": work.bytes,
                **_tail(work, s, batch_size),
            }
            for engine, layout, work, s in zip(engines, layouts, works, samples, strict=True)
        ]
    finally:
        for engine in engines:
            engine.close()


def bench_prefill(
    source: ModelSource,
    config: EngineConfig,
    layouts: Sequence[Layout],
    input_len: int,
    rounds: int,
    report: Report,
) -> list[dict[str, Any]]:
    """One prompt in one step, for each layout; the fields that docs/benchmarks.md explains."""
    config = config.resolve(max_num_batched_tokens=max(input_len, config.max_num_batched_tokens))
    engines = [_engine(source, config, layout, 1, input_len) for layout in layouts]
    try:
        flops = prefill_flops(source.config, input_len)
        works = [Work(engine.weight_bytes, flops) for engine in engines]
        limits = [Limits(e.config.tensor_parallel_size * e.config.threads, e.operands) for e in engines]
        steps = [engine.prefill_step() for engine in engines]
        samples = measure(engines, steps, works, limits, rounds, report, count=2)
        return [
            {
                **_head(engine, layout),
                "input_len": input_len,
                "tokens_per_s": input_len / median(s.seconds),
                "ms_per_step": median(s.seconds) * 1e3,
                "flops": flops,
                "gflops": flops / median(s.seconds) / 1e9,
                **_tail(work, s, input_len),
            }
            for engine, layout, work, s in zip(engines, layouts, works, samples, strict=True)
        ]
    finally:
        for engine in engines:
            engine.close()


def decode_flops(model: ModelConfig, batch: int, context: int) -> float:
    """Two for each weight multiplied and token, four for each position and query column of attention."""
    weights = model.num_layers * _layer_weights(model) + model.vocab_size * model.hidden_size
    seen = model.positions_read(context - 1, context)
    return batch * (2 * weights + 4.0 * model.num_heads * model.head_dim * seen)


def prefill_flops(model: ModelConfig, tokens: int) -> float:
    """Two for each weight multiplied, the LM head for one position, four for what attention sees."""
    dense = 2.0 * tokens * model.num_layers * _layer_weights(model) + 2.0 * model.vocab_size * model.hidden_size
    return dense + 4.0 * model.num_heads * model.head_dim * model.positions_read(0, tokens)


def _layer_weights(model: ModelConfig) -> int:
    attention = 2 * model.num_heads * model.head_dim + 2 * model.num_kv_heads * model.head_dim
    return model.hidden_size * (attention + 3 * model.intermediate_size)


def _engine(source: ModelSource, config: EngineConfig, layout: Layout, sequences: int, length: int) -> BenchEngine:
    chosen = config.resolve(tensor_parallel_size=layout.tp, threads_per_rank=layout.threads, tp_weights=None)
    return BenchEngine(chosen, source, sequences, length)


def _head(engine: BenchEngine, layout: Layout) -> dict[str, Any]:
    return {
        "tp": layout.tp,
        "threads_per_rank": layout.threads,
        "dtype": engine.config.dtype,
        "quantization": engine.quantization,
        "backend": engine.config.backend,
    }


def _tail(work: Work, s: Samples, tokens: int) -> dict[str, Any]:
    """The limit, and what fraction of it was reached: the median of each round's ratio."""
    by_memory = work.bytes / median(s.read) >= work.flops / median(s.multiply)
    ratios = [limit / seconds for limit, seconds in zip(s.limit_seconds, s.seconds, strict=True)]
    own = [
        max(work.bytes / read, work.flops / rate) / seconds
        for read, rate, seconds in zip(s.read, s.own_multiply, s.seconds, strict=True)
    ]
    return {
        "membw_gbps": median(s.read) / 1e9,
        "multiply_gflops": median(s.multiply) / 1e9,
        "own_multiply_gflops": median(s.own_multiply) / 1e9,
        "limit": "memory" if by_memory else "compute",
        "limit_tokens_per_s": tokens / median(s.limit_seconds),
        "fraction_of_limit": median(ratios),
        "fraction_of_own_limit": median(own),
        "collective_share": median(s.collective),
        "wait_share": median(s.wait),
        "outside_kernels_share": median(s.outside),
    }
