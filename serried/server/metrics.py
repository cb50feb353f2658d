"""Prometheus metrics: what the server sees of each request, and the engine's own figures at the time of a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serried import __version__
from serried.engine.interface import EngineStats

disable_created_metrics()  # type: ignore[no-untyped-call]  # second series, which nobody asks for
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)

# Name, help, field of EngineStats. Blocks, running and waiting are of now, the rest count up.
_GAUGES = (
    ("serried_requests_running", "Sequences that take part in steps", "running"),
    ("serried_requests_waiting", "Sequences in the queue", "waiting"),
    ("serried_kv_blocks_used", "Blocks of the KV cache in use", "blocks_used"),
    ("serried_kv_blocks_total", "Blocks of the KV cache", "blocks_total"),
)
_COUNTERS = (
    ("serried_prefix_cache_queries", "Tokens of prompts looked up in the prefix cache", "prefix_queries"),
    ("serried_prefix_cache_hits", "Tokens of prompts found in the prefix cache", "prefix_hits"),
    ("serried_preemptions", "Requests that had to give up their blocks", "preemptions"),
    ("serried_prompt_tokens", "Tokens of prompts taken in", "prompt_tokens"),
    ("serried_generation_tokens", "Tokens generated", "generated_tokens"),
    ("serried_steps", "Steps of the engine", "steps"),
    ("serried_step_seconds", "Time in steps", "step_seconds"),
    ("serried_restarts", "Restarts of the ranks after a failure", "restarts"),
)


class Metrics:
    """The registry of one server. stats: asked for at each scrape; None while there is no engine."""

    def __init__(self, stats: Callable[[], EngineStats | None], model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(stats))
        info = Gauge("serried_info", "Version and model", ["version", "model"], registry=self.registry)
        info.labels(__version__, model).set(1)
        self.ttft = self._histogram(
            "serried_time_to_first_token_seconds", "From a request's arrival to its first token", _SECONDS
        )
        self.itl = self._histogram("serried_inter_token_latency_seconds", "Between a sample's tokens", _TOKEN_SECONDS)
        self.tpot = self._histogram(
            "serried_time_per_output_token_seconds", "Mean time between the tokens of a sample", _TOKEN_SECONDS
        )
        self.e2e = self._histogram("serried_e2e_request_latency_seconds", "A whole request", _SECONDS)
        self.prompt = self._histogram("serried_request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self.output = self._histogram("serried_request_generation_tokens", "Tokens of an output", _TOKENS)
        self.finished = Counter(
            "serried_requests_finished", "Samples that ended, by reason", ["reason"], registry=self.registry
        )
        self.responses = Counter(
            "serried_http_responses", "Responses, by route and status", ["path", "status"], registry=self.registry
        )

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


@dataclass
class RequestTimes:
    """The times of one request, which it reports as it goes."""

    metrics: Metrics
    arrived: float
    first: dict[int, float] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)
    count: dict[int, int] = field(default_factory=dict)

    def tokens(self, index: int, new: int, now: float) -> None:
        """A sample has got new tokens."""
        if not self.first:
            self.metrics.ttft.observe(now - self.arrived)
        if index in self.last:
            for _ in range(new):
                self.metrics.itl.observe((now - self.last[index]) / new)
        self.first.setdefault(index, now)
        self.last[index] = now
        self.count[index] = self.count.get(index, 0) + new

    def finished(self, index: int, reason: str) -> None:
        """A sample has ended."""
        self.metrics.finished.labels(reason).inc()
        count = self.count.get(index, 0)
        self.metrics.output.observe(count)
        if count > 1:
            self.metrics.tpot.observe((self.last[index] - self.first[index]) / (count - 1))


class _EngineCollector(Collector):
    """The engine's figures, as of the scrape."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats() or EngineStats()
        for name, text, attribute in _GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(stats, attribute))
        usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        yield GaugeMetricFamily("serried_kv_cache_usage", "Part of the KV cache in use, 0 to 1", value=usage)
        for name, text, attribute in _COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(stats, attribute))
        seconds = CounterMetricFamily(
            "serried_rank_seconds", "A rank's time, by what it did", labels=["rank", "activity"]
        )
        share = GaugeMetricFamily(
            "serried_rank_collective_share",
            "Part of a rank's working time spent in collectives, 0 to 1",
            labels=["rank"],
        )
        for rank in stats.ranks:
            for activity in ("compute", "collective", "idle"):
                seconds.add_metric([str(rank.rank), activity], getattr(rank, activity))
            working = rank.compute + rank.collective
            share.add_metric([str(rank.rank)], rank.collective / working if working else 0.0)
        yield seconds
        yield share
