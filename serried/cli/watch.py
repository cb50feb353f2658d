"""Watch: the line of figures under an answer."""

from __future__ import annotations

import time
from collections.abc import Iterator

from serried.bench.membw import read_bandwidth
from serried.engine.llm import LLM
from serried.engine.outputs import Delta


class Watch:
    """Measures a stream of answers from its first token on: the decode, without the prefill before it."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._tokens = 0
        self._steps = 0
        self._elapsed = 0.0
        self._in_collectives = 0.0

    def over(self, deltas: Iterator[Delta]) -> Iterator[Delta]:
        """Pass the stream on, counting."""
        start: float | None = None
        counters = self._llm.executor.counters
        before, steps = 0.0, 0
        for delta in deltas:
            if start is None:
                start, before, steps = time.perf_counter(), counters.seconds, self._llm.core.steps
            else:
                self._tokens += 1
            self._elapsed = time.perf_counter() - start
            self._steps = self._llm.core.steps - steps
            self._in_collectives = counters.seconds - before
            yield delta

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second after the first; 0 where there was but one."""
        return self._tokens / self._elapsed if self._tokens else 0.0

    def line(self) -> str:
        """Tokens a second, the fraction of the memory's speed, the share of time in collectives."""
        if not self._tokens:
            return "1 token"
        read = self._llm.executor.worker.weight_bytes_per_step * self._steps / self._elapsed
        config = self._llm.config
        limit = read_bandwidth(min(config.threads * config.tensor_parallel_size, 64))
        read *= config.tensor_parallel_size
        return (
            f"{self.tokens_per_s:.1f} tokens/s after the first, weights read at {read / 1e9:.1f} GB/s = "
            f"{read / limit:.0%} of the memory's {limit / 1e9:.1f} GB/s, "
            f"{self._in_collectives / self._elapsed:.0%} of the time in collectives (tp {config.tensor_parallel_size})"
        )
