"""The residual's rows stay with one rank each, and linears are computed for whoever keeps the row: the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from test_exact import logits_of, make_requests, same_bits
from tiny_models import Models

from serried.config import EngineConfig
from serried.engine.executor import Executor, create_executor
from serried.models.registry import open_model

LENGTHS = (300, 257, 100, 23)  # 680 rows in a step: two pieces of a slot on 2 ranks, and odd shares on 3
ONE_MORE = (300, 213)  # than fill a slot on each of 2 ranks: of the second piece one rank has no row
VARIANTS = {  # ranks, threads, algorithm
    "one rank": (1, 1, "auto"),
    "2, auto": (2, 1, "auto"),
    "2 of two threads, auto": (2, 2, "auto"),
    "2, together": (2, 1, "one-shot"),
    "2, apart": (2, 1, "two-shot"),
    "3, apart": (3, 1, "two-shot"),
    "4, apart": (4, 1, "two-shot"),
    "5, auto": (5, 1, "auto"),
}


@pytest.fixture(scope="module", params=[None, "int8"], ids=["bf16", "int8"])
def engines(request: pytest.FixtureRequest, tiny: Models) -> Iterator[dict[str, Executor]]:
    path = str(tiny.directory("split-wide"))
    common = {"dtype": "bfloat16", "quantization": request.param, "backend": "native", "max_model_len": 320}
    with ExitStack() as stack:
        made = {}
        for name, (ranks, threads, algorithm) in VARIANTS.items():
            options = {"tensor_parallel_size": ranks, "threads_per_rank": threads, "allreduce_algorithm": algorithm}
            made[name] = create_executor(EngineConfig.create(path, **{**common, **options}), open_model(path))
            stack.callback(made[name].close)
        yield made


def logits(executor: Executor, chunk: int, lengths: tuple[int, ...] = LENGTHS) -> list[np.ndarray]:
    return logits_of(executor, make_requests(executor, lengths, 320), chunk)


@pytest.mark.parametrize(("lengths", "chunk"), [(LENGTHS, 1000), (LENGTHS, 90), (LENGTHS, 3), (ONE_MORE, 1000)])
def test_the_same_bits(engines: dict[str, Executor], lengths: tuple[int, ...], chunk: int) -> None:
    expected = logits(engines["one rank"], 1000, lengths)
    assert all(np.isfinite(rows).all() and rows.std() > 0.1 for rows in expected)
    for name, executor in engines.items():
        found = logits(executor, chunk, lengths)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True)), f"{name}, chunks of {chunk}"


def reduced_bytes(executor: Executor, chunk: int) -> int:
    comm = executor.worker.comm
    comm.reset_timings()
    logits(executor, chunk)
    return int(comm.timings()["reduce_nodes"].bytes)


def test_what_is_sent(engines: dict[str, Executor]) -> None:
    """Long prompts go apart by themselves, and send the sums of half the rows; short steps where they are told."""
    whole = 2 * 2 * sum(LENGTHS) * 1024 * 4  # layers, reductions
    assert reduced_bytes(engines["2, together"], 1000) == whole
    assert reduced_bytes(engines["2, auto"], 1000) == whole // 2
    assert reduced_bytes(engines["2, auto"], 3) == whole
    assert whole // 2 <= reduced_bytes(engines["2, apart"], 2) < whole // 2 * 1.01  # of an odd number of rows, more
