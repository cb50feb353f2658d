"""`serried bench kernels`: each linear of a model by itself, and what the reduction tree costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from serried._native import core, open_kernels
from serried.backends.native import leaf_table
from serried.bench.limits import Limits, median
from serried.config import EngineConfig
from serried.models.config import ModelConfig
from serried.parallel.reduction import ReductionPlan

PREFILL = 512  # tokens
COPIES_BYTES = 512 << 20  # decode reads so many bytes of copies in turn, so that no cache can hold them


def bench_kernels(
    model: ModelConfig, config: EngineConfig, rounds: int, report: Callable[[int, int], None]
) -> dict[str, Any]:
    """Decode as a fraction of the memory's speed, prefill as one of the multiply limit, and the cost of exactness."""
    limits = Limits(config.threads, config.dtype)
    bench = _Linears(config.threads, config.dtype)
    partition = model.partition((1,))
    hidden, q, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes: list[tuple[str, int, int, ReductionPlan | None]] = [
        ("qkv_proj", q + 2 * kv, hidden, None),
        ("o_proj", hidden, q, partition.attention.plan),
        ("gate_up_proj", 2 * model.intermediate_size, hidden, None),
        ("down_proj", hidden, model.intermediate_size, partition.mlp.plan),
        ("lm_head", model.vocab_size, hidden, None),
    ]
    runs = []
    for done, (name, outputs, inputs, plan) in enumerate(shapes):
        runs.append({"kernel": name, **bench.measure(limits, outputs, inputs, plan, rounds)})
        report(done + 1, len(shapes))
    return {
        "bench": "kernels",
        "isa": bench.kernels.isa,
        "threads": config.threads,
        "dtype": config.dtype,
        "runs": runs,
    }


class _Linears:
    """Measures linears of one dtype with a pool of threads."""

    def __init__(self, threads: int, dtype: str) -> None:
        self.kernels = open_kernels()
        self._pool = core.Pool(threads, [], self.kernels)
        self._dtype = dtype
        self._itemsize = 4 if dtype == "float32" else 2

    def measure(
        self, limits: Limits, outputs: int, inputs: int, plan: ReductionPlan | None, rounds: int
    ) -> dict[str, Any]:
        store = core.Store(self.kernels)
        size = outputs * inputs * self._itemsize
        copies = [self._weight(store, outputs, inputs) for _ in range(max(1, COPIES_BYTES // size))]
        x = np.full(PREFILL * copies[0].padded_inputs * self._itemsize, 0x3C, np.uint8)
        y = np.empty((PREFILL, copies[0].padded_outputs), np.float32)

        def seconds(weight: Any, tokens: int, native_plan: Any) -> float:
            arguments = (self.kernels, self._pool, weight, native_plan, x.ctypes.data, y.ctypes.data, tokens)
            return float(core.linear_seconds(*arguments))

        native = self._plan(plan) if plan else None
        decode, prefill, tree = [], [], []
        for _ in range(rounds):
            read = limits.read()
            decode.append(len(copies) * size / sum(seconds(w, 1, native) for w in copies) / read)
            rate = limits.multiply()
            exact = seconds(copies[0], PREFILL, native)
            prefill.append(2.0 * PREFILL * outputs * inputs / exact / rate)
            if native:
                tree.append(exact / seconds(copies[0], PREFILL, None) - 1)
        return {
            "outputs": outputs,
            "inputs": inputs,
            "leaves": len(plan.leaves[0]) if plan else 1,
            "fraction_of_memory_decode": median(decode),
            "fraction_of_multiply_prefill": median(prefill),
            "fraction_exactness_costs": median(tree) if tree else None,
        }

    def _weight(self, store: Any, outputs: int, inputs: int) -> Any:
        weight = store.linear(outputs, inputs, self._dtype)
        rows = np.full((256, inputs), 0.01, np.float32)
        for row in range(0, outputs, 256):
            store.write(weight, row, min(256, outputs - row), rows.ctypes.data, "float32", inputs)
        return weight

    def _plan(self, plan: ReductionPlan) -> Any:
        return core.Plan(list(plan.counts), [list(p) for p in plan.across.pairs], 0, leaf_table(plan, 0))
