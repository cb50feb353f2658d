"""The native backend gives the same bits whatever a request's company, chunks, threads and split are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import Models

from serried.config import EngineConfig
from serried.engine.batch import build_step
from serried.engine.executor import Executor, create_executor
from serried.engine.request import Request
from serried.engine.scheduler import Scheduled
from serried.models.registry import open_model
from serried.sampling_params import SamplingParams

LENGTHS = (1, 7, 33, 64, 5, 90, 31, 32)  # prompts of a batch of eight: across blocks of 32 and of 16 positions
# 9 heads on 2 ranks; heads of 32; a hidden size of two and a half groups. MLPs and vocabularies of odd sizes.
PLAIN = [(m, d, None) for m in ("llama-uneven", "qwen3-uneven", "qwen3-mha") for d in ("float32", "bfloat16")]
QUANTIZED = [
    ("llama-uneven", "bfloat16", "int8"),
    ("qwen3-uneven", "bfloat16", "int4"),
    ("qwen3-mha", "float32", "int4"),
]
DTYPES = ("float32", "bfloat16")
# Every family, with 1 to 8 KV heads, odd vocabularies and odd widths of the MLP.
FAMILIES = {
    "split-5": DTYPES[:1],
    "split-mistral": DTYPES[1:],
    "split-qwen2": DTYPES[1:],
    "split-qwen3": DTYPES[:1],
    "split-gemma2": DTYPES,
    "split-gemma3": DTYPES,
    "split-phi3": DTYPES[:1],
    "split-phi3-partial": DTYPES[1:],
}


@dataclass
class Engines:
    """Engines of one model, dtype and quantization, by what differs between them."""

    engines: dict[str, Executor]
    vocab: int
    alone: dict[int, np.ndarray]


def open_engines(path: str, dtype: str, quantization: str | None, stack: ExitStack) -> Engines:
    source = open_model(path)
    variants = {
        "one thread": {"threads_per_rank": 1},
        "two threads": {"threads_per_rank": 2},
        "tp 2": {"tensor_parallel_size": 2, "threads_per_rank": 1},
        "tp 3": {"tensor_parallel_size": 3, "threads_per_rank": 1, "block_size": 16},
        "tp 2, 3:1": {"tensor_parallel_size": 2, "threads_per_rank": 2, "tp_weights": (3, 1)},
    }
    engines = {}
    common = {"dtype": dtype, "quantization": quantization, "backend": "native", "max_model_len": 128}
    for name, options in variants.items():
        config = EngineConfig.create(path, **{**common, **options})
        engines[name] = create_executor(config, source)
        stack.callback(engines[name].close)
    return Engines(engines, source.config.vocab_size, {})


@pytest.fixture(scope="module", params=PLAIN + QUANTIZED, ids=lambda p: "-".join(filter(None, p)))
def engines(request: pytest.FixtureRequest, tiny: Models):  # type: ignore[no-untyped-def]
    name, dtype, quantization = request.param
    with ExitStack() as stack:
        yield open_engines(str(tiny.directory(name)), dtype, quantization, stack)


def make_requests(executor: Executor, lengths: Sequence[int], vocab: int) -> list[Request]:
    pool, size = executor.new_pool(), executor.config.block_size
    requests = []
    for i, length in enumerate(lengths):
        prompt = [int(t) for t in np.random.default_rng(length).integers(0, vocab, length)]
        request = Request(i, prompt, SamplingParams(temperature=0, max_tokens=1), 0)
        request.blocks = pool.take(-(-length // size)) or []
        requests.append(request)
    return requests


def logits_of(executor: Executor, requests: Sequence[Request], chunk: int) -> list[np.ndarray]:
    """The logits of all positions of all requests, every step taking `chunk` tokens of each."""
    rows: list[list[np.ndarray]] = [[] for _ in requests]
    for start in range(0, max(len(r.prompt) for r in requests), chunk):
        parts = [Scheduled(r, start, min(start + chunk, len(r.prompt))) for r in requests if start < len(r.prompt)]
        logits = executor.execute(build_step(parts, executor.config.block_size, whole_logits=True)).logits
        for part in parts:
            count = part.stop - part.start
            rows[part.request.id].append(logits[:count])
            logits = logits[count:]
    return [np.concatenate(found) for found in rows]


def alone(engines: Engines, length: int) -> np.ndarray:
    """A request by itself, in one step, with one thread: what everything else must equal to the bit."""
    if length not in engines.alone:
        executor = engines.engines["one thread"]
        engines.alone[length] = logits_of(executor, make_requests(executor, [length], engines.vocab), length)[0]
    return engines.alone[length]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool((a.view(np.int32) == b.view(np.int32)).all())


@pytest.mark.parametrize("chunk", [1, 7, 64, 128])
@pytest.mark.parametrize("variant", ["one thread", "two threads", "tp 2", "tp 3", "tp 2, 3:1"])
def test_a_batch_of_eight_in_chunks(engines: Engines, variant: str, chunk: int) -> None:
    executor = engines.engines[variant]
    found = logits_of(executor, make_requests(executor, LENGTHS, engines.vocab), chunk)
    for length, logits in zip(LENGTHS, found, strict=True):
        assert np.isfinite(logits).all()
        assert same_bits(logits, alone(engines, length)), f"{variant}, chunks of {chunk}, prompt of {length}"


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=6),
    chunk=st.integers(1, 110),
    variant=st.sampled_from(["two threads", "tp 2", "tp 3", "tp 2, 3:1"]),
)
def test_any_batch_in_any_chunks(engines: Engines, lengths: list[int], chunk: int, variant: str) -> None:
    executor = engines.engines[variant]
    found = logits_of(executor, make_requests(executor, lengths, engines.vocab), chunk)
    assert all(same_bits(logits, alone(engines, length)) for length, logits in zip(lengths, found, strict=True))


@pytest.mark.parametrize(("name", "dtype"), [(n, d) for n, dtypes in FAMILIES.items() for d in dtypes])
def test_every_family_at_every_size(tiny: Models, name: str, dtype: str) -> None:
    """Prompts longer than the window, whole at TP = 1, in chunks of a batch at the others: the same bits."""
    path, lengths = str(tiny.directory(name)), (70, 3, 33)
    found = {}
    for size, chunk in ((1, 100), (2, 100), (3, 7), (5, 13)):
        config = EngineConfig.create(
            path, dtype=dtype, backend="native", max_model_len=128, tensor_parallel_size=size, threads_per_rank=1
        )
        executor = create_executor(config, open_model(path))
        try:
            vocab = executor.worker.model.config.vocab_size
            found[size] = logits_of(executor, make_requests(executor, lengths, vocab), chunk)
        finally:
            executor.close()
    assert all(np.isfinite(logits).all() and logits.std() > 0.3 for logits in found[1])
    for size, logits in found.items():
        assert all(same_bits(a, b) for a, b in zip(logits, found[1], strict=True)), f"tp {size}"


def test_other_prompts_give_other_bits(engines: Engines) -> None:
    """The comparison can fail."""
    assert not same_bits(alone(engines, 31)[:1], alone(engines, 32)[:1])
