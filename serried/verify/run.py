"""One run of `verify`: a prompt through one split of a model, greedily, keeping every logit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serried.engine.batch import build_step
from serried.engine.executor import Executor
from serried.engine.request import Request
from serried.engine.scheduler import Scheduled
from serried.engine.worker import RankInfo
from serried.errors import InputError
from serried.parallel.comm import Counters
from serried.sampling_params import SamplingParams


@dataclass(frozen=True)
class RunResult:
    """What one split gave.

    tokens: the greedy tokens. logits: float32 [prompt + tokens - 1, vocabulary]: of all prefill positions, then of
    each decode step. The two counts are of the prefill, on rank 0: calls of an all-reduce, bytes that it contributed.
    """

    tp: int
    ranks: list[RankInfo]
    all_reduces_prefill: int
    collective_bytes_prefill: int
    tokens: list[int]
    logits: npt.NDArray[np.float32]
    isa: str


def run_greedy(executor: Executor, prompt: Sequence[int], count: int) -> RunResult:
    """Prefill the prompt in one step with the logits of every position, then decode `count` - 1 steps."""
    size = executor.config.block_size
    request = Request(0, list(prompt), SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), 0)
    blocks = executor.new_pool().take(-(-request.longest // size))
    if blocks is None or len(prompt) + count > executor.max_model_len:
        raise InputError(
            f"{len(prompt)} prompt tokens and --tokens {count} do not fit the context of {executor.max_model_len}"
        )
    request.blocks = blocks
    rows = [executor.execute(build_step([Scheduled(request, 0, len(prompt))], size, whole_logits=True)).logits]
    all_reduces, moved = executor.counters.all_reduces, model_bytes(executor.counters)
    request.append(int(rows[0][-1].argmax()))
    while not request.finish_reason:
        part = Scheduled(request, request.length - 1, request.length)
        rows.append(executor.execute(build_step([part], size, whole_logits=True)).logits)
        request.append(int(rows[-1][-1].argmax()))
    executor.pause()
    return RunResult(
        tp=executor.config.tensor_parallel_size,
        ranks=executor.ranks,
        all_reduces_prefill=all_reduces,
        collective_bytes_prefill=moved,
        tokens=request.output,
        logits=np.concatenate(rows),
        isa=executor.worker.backend.isa,
    )


def model_bytes(counters: Counters) -> int:
    """Bytes that this rank brought to the model's own collectives: a broadcast is torchrun's way to hand out steps."""
    return sum(count.bytes for name, count in counters.by_operation.items() if name != "broadcast")
