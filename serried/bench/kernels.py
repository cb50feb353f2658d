"""`serried bench kernels`: each linear of a model by itself, and what the reduction tree costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from serried._native import core, open_kernels
from serried.backends.native import leaf_table
from serried.bench.limits import Limits, median
from serried.config import EngineConfig
from serried.models.decoder import Decoder
from serried.models.registry import ModelSource
from serried.parallel.comm import LocalComm
from serried.parallel.reduction import ReductionPlan
from serried.weights.load import assign_methods
from serried.weights.spec import ITEMSIZE, Parameter

PREFILL = 512  # tokens
COPIES_BYTES = 512 << 20  # decode reads so many bytes of copies in turn, so that no cache can hold them


def bench_kernels(
    source: ModelSource, config: EngineConfig, rounds: int, report: Callable[[int, int], None]
) -> dict[str, Any]:
    """Decode as a fraction of the memory's speed, prefill as one of the multiply limit, and the cost of exactness."""
    limits = Limits(config.threads, config.dtype)
    bench = _Linears(config.threads)
    runs = []
    shapes = _linears(source, config)
    for done, (name, parameter, plan) in enumerate(shapes):
        method = parameter.method
        dtype = config.dtype
        form = Form(method.name, method.bits, "int8") if method else Form(dtype, 8 * ITEMSIZE[dtype], dtype)
        outputs, inputs = parameter.shape
        figures = bench.measure(limits, form, outputs, inputs, plan, rounds)
        runs.append({"kernel": name, "format": form.name, **figures})
        report(done + 1, len(shapes))
    return {
        "bench": "kernels",
        "isa": bench.kernels.isa,
        "threads": config.threads,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "runs": runs,
    }


def _linears(source: ModelSource, config: EngineConfig) -> list[tuple[str, Parameter, ReductionPlan | None]]:
    """The linears of one layer and the LM head, unsplit, each with the method that the loader would give it."""
    partition = source.config.partition((1,))
    model = Decoder(source.config, partition, LocalComm(), max_positions=1)
    parameters = list(model.parameters())
    preset = source.directory is None and source.gguf is None  # which has no weights, and needs none here
    checkpoint = source.checkpoint(parameters, "dummy" if preset else config.load_format, config.seed)
    assign_methods(parameters, checkpoint, config.quantization)
    checkpoint.close()
    layer = model.layers[0]
    return [
        ("qkv_proj", layer.attention.qkv_proj.weight, None),
        ("o_proj", layer.attention.o_proj.weight, partition.attention.plan),
        ("gate_up_proj", layer.mlp.gate_up_proj.weight, None),
        ("down_proj", layer.mlp.down_proj.weight, partition.mlp.plan),
        ("lm_head", model.lm_head.weight, None),
    ]


@dataclass(frozen=True)
class Form:
    """How a weight is kept: the kernels' name of it, bits of a weight, what is multiplied."""

    name: str
    bits: float
    operands: str


class _Linears:
    """Measures linears with a pool of threads."""

    def __init__(self, threads: int) -> None:
        self.kernels = open_kernels()
        self._pool = core.Pool(threads, [], self.kernels)

    def measure(
        self, limits: Limits, form: Form, outputs: int, inputs: int, plan: ReductionPlan | None, rounds: int
    ) -> dict[str, Any]:
        limits = limits.of(form.operands)
        store = core.Store(self.kernels)
        size = outputs * inputs * form.bits / 8
        copies = [self._weight(store, form, outputs, inputs) for _ in range(max(1, int(COPIES_BYTES // size)))]
        x = _activations(copies[0], form)
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

    def _weight(self, store: Any, form: Form, outputs: int, inputs: int) -> Any:
        weight = store.linear(outputs, inputs, form.name)
        rows = np.full((256, inputs), 0.01, np.float32)
        for row in range(0, outputs, 256):
            store.write(weight, row, min(256, outputs - row), rows.ctypes.data, "float32", inputs)
        return weight

    def _plan(self, plan: ReductionPlan) -> Any:
        return core.Plan(list(plan.counts), [list(p) for p in plan.across.pairs], 0, leaf_table(plan, 0))


def _activations(weight: Any, form: Form) -> npt.NDArray[np.uint8]:
    """Rows of x as bytes: numbers that are no zeros, in int8 with scales and sums of zero behind them."""
    x = np.zeros((PREFILL, weight.input_bytes), np.uint8)
    x[:, : weight.padded_inputs * ITEMSIZE.get(form.operands, 1)] = 0x3C
    return x
