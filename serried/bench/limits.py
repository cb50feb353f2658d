"""The limits that benchmarks are held against: how fast memory is read, how fast the cores multiply."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np

from serried._native import core, open_kernels

READ_BYTES = 768 << 20  # well beyond any cache that is ours alone
MULTIPLY_ROUNDS = 400_000


class Limits:
    """Measures both limits with as many threads as an engine computes with. Meant to be asked in turn with it.

    operands: what is multiplied: float32, bfloat16, or int8 (of all quantized weights).
    read: bytes a second. multiply: operations a second, of which a multiply-add makes two: the rate of float32
    multiply-adds in registers, and twice that for bfloat16 and int8. own_multiply: the rate of the instruction that
    the chosen kernels really use (with AMX it is far above).
    """

    def __init__(self, threads: int, operands: str = "bfloat16") -> None:
        self.threads = threads
        self.operands = operands
        self._kernels = open_kernels()
        self._pool = core.Pool(threads, [], self._kernels)
        self._data = np.ones(READ_BYTES // 8, np.int64)

    def of(self, operands: str) -> Limits:
        """The same threads and the same memory, for other operands."""
        other = copy(self)
        other.operands = operands
        return other

    def read(self) -> float:
        """Bytes per second that the threads read together, each its own part."""
        seconds = core.read_seconds(self._kernels, self._pool, self._data.ctypes.data, self._data.nbytes)
        return float(self._data.nbytes / seconds)

    def multiply(self) -> float:
        """Operations per second: float32 fused multiply-adds, twice that for narrower operands."""
        rate = float(core.multiply_rate(self._kernels, self._pool, "float32", MULTIPLY_ROUNDS))
        return rate * (1 if self.operands == "float32" else 2)

    def own_multiply(self) -> float:
        """Operations per second of the instruction that the kernels of this set multiply with."""
        return float(core.multiply_rate(self._kernels, self._pool, self.operands, MULTIPLY_ROUNDS))


def median(values: list[float]) -> float:
    return float(np.median(values))


def bench_membw(threads: int, repeats: int, report: Any) -> dict[str, Any]:
    """How fast 1, 2, ... threads read memory."""
    runs = []
    for count in sorted({1, *range(2, threads, max(1, threads // 8)), threads}):
        limits = Limits(count)
        rates = [limits.read() for _ in range(repeats)]
        runs.append({"threads": count, "membw_gbps": median(rates) / 1e9, "best_gbps": max(rates) / 1e9})
        report(len(runs), 0)
    return {"bench": "membw", "isa": limits._kernels.isa, "runs": runs}
