"""Watch: the line of figures under an answer."""

from __future__ import annotations

import time
from collections.abc import Iterator

from serried import _native
from serried.bench.membw import read_bandwidth
from serried.engine.llm import LLM
from serried.engine.outputs import Delta
from serried.machine import available_memory

LOOKS = 5  # at the memory's speed, of which the best counts


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

    def line(self, limit: float | None = None) -> str:
        """Tokens a second, the fraction of the memory's speed, the share of time in collectives.

        limit: the memory's speed in bytes a second, where it has been measured already.
        """
        if not self._tokens:
            return "1 token"
        config = self._llm.config
        read = self._weight_bytes() * self._steps / self._elapsed
        limit = limit or memory_speed(config.threads * config.tensor_parallel_size)
        return (
            f"{self.tokens_per_s:.1f} tokens/s after the first, weights read at {read / 1e9:.1f} GB/s = "
            f"{read / limit:.0%} of the memory's {limit / 1e9:.1f} GB/s, "
            f"{self._in_collectives / self._elapsed:.0%} of the time in collectives (tp {config.tensor_parallel_size})"
        )

    def _weight_bytes(self) -> float:
        """Bytes of weights that a step of all ranks reads: rank 0's, times what all hold for what it holds."""
        executor = self._llm.executor
        held = [rank.parameters for rank in executor.ranks]
        return executor.worker.weight_bytes_per_step * sum(held) / held[0]


def memory_speed(threads: int) -> float:
    """Bytes per second that so many threads read together: the best of some looks, by the kernels' own way to read.

    Without the extension, or the memory that it takes: by NumPy's, which is slower.
    """
    if _native.available():
        from serried.bench.limits import READ_BYTES, Limits

        if available_memory() > 2 * READ_BYTES:
            limits = Limits(threads)
            return max(limits.read() for _ in range(LOOKS))
    return read_bandwidth(min(threads, 64), repeats=LOOKS)
