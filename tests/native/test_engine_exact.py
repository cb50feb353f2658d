"""A busy engine answers as an idle one: the same tokens, and log-probabilities equal to the bit.

The reference has one request at a time, in whole prompts, with no prefix cache and room enough. The busy engine has
many at once, in chunks of 19 tokens, with prefix caching and so few blocks that requests are preempted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_soak import lengths
from tiny_models import Models, edited_json

from serried import LLM, SamplingParams
from serried.engine.outputs import Logprob, RequestOutput

BLOCK, BLOCKS = 8, 24  # of the busy engine: one of the longest requests takes 20
PREFIXES, LONGEST, NEW = 3, 110, 48  # shared beginnings, a prompt's and an answer's most tokens
MODELS = [("llama-uneven", "bfloat16", None), ("qwen3-uneven", "bfloat16", "int8"), ("split-5", "float32", None)]


@contextmanager
def engine(path: Path, **options: Any) -> Iterator[LLM]:
    with LLM(str(path), backend="native", threads_per_rank=1, **{"max_model_len": 256, **options}) as llm:
        yield llm


@contextmanager
def busy(path: Path, tp: int, **options: Any) -> Iterator[LLM]:
    with engine(path, **options, tensor_parallel_size=tp, max_num_seqs=1, kv_cache_memory=1 << 20) as probe:
        one = probe.executor.worker.cache.bytes_per_block // probe.config.block_size * BLOCK  # type: ignore[attr-defined]
    few = {"block_size": BLOCK, "kv_cache_memory": BLOCKS * one, "max_num_batched_tokens": 19, "max_num_seqs": 12}
    few["max_model_len"] = BLOCKS * BLOCK
    with engine(path, **options, tensor_parallel_size=tp, **few) as llm:
        assert llm.executor.worker.cache.blocks == BLOCKS  # type: ignore[attr-defined]
        yield llm


def make_prompt(rng: np.random.Generator, shared: Sequence[list[int]], vocab: int) -> list[int]:
    """Random tokens, of half of the prompts behind a beginning that others have too."""
    own = [int(t) for t in rng.integers(0, vocab, rng.integers(1, 40))]
    if rng.random() < 0.5:
        return own
    common = shared[rng.integers(len(shared))]
    return common[: rng.integers(BLOCK, len(common) + 1)] + own


def make_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    """Any mixture of what a request may ask for."""

    def maybe(value: Any, otherwise: Any, chance: float = 0.3) -> Any:
        return value if rng.random() < chance else otherwise

    def some(count: int) -> list[int]:
        return [int(t) for t in rng.integers(0, vocab, count)]

    greedy = rng.random() < 0.3
    return SamplingParams(
        n=1 if greedy else maybe(int(rng.integers(2, 4)), 1),
        temperature=0.0 if greedy else float(rng.choice([0.3, 0.8, 1.0, 1.7])),
        top_k=maybe(int(rng.choice([1, 5, 40, 100_000])), 0),
        top_p=maybe(float(rng.choice([0.1, 0.5, 0.9, 0.99])), 1.0),
        min_p=maybe(float(rng.choice([0.01, 0.2])), 0.0, 0.15),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 1.8)), 1.0),
        seed=int(rng.integers(0, 1 << 62)),
        logit_bias=maybe({t: float(rng.uniform(-100, 100)) for t in some(5)}, None),
        allowed_token_ids=maybe(sorted({*some(60), 2}), None, 0.15),
        bad_words=maybe([some(1), some(2)], (), 0.15),
        stop_token_ids=maybe(some(6), ()),
        ignore_eos=bool(rng.random() < 0.5),
        max_tokens=int(rng.integers(1, NEW + 1)),
        logprobs=maybe(int(rng.integers(0, 6)), None, 0.6),
        prompt_logprobs=maybe(int(rng.integers(0, 4)), None, 0.25),
    )


def make_requests(rng: np.random.Generator, count: int, vocab: int) -> list[tuple[list[int], SamplingParams]]:
    shared = [[int(t) for t in rng.integers(0, vocab, LONGEST - 40)] for _ in range(PREFIXES)]
    return [(make_prompt(rng, shared, vocab), make_params(rng, vocab)) for _ in range(count)]


def bits(output: RequestOutput) -> list[Any]:
    """All that an answer says, with its numbers as their bits."""
    return [
        _positions(output.prompt_logprobs),
        *((one.token_ids, one.finish_reason, one.stop_reason, _positions(one.logprobs)) for one in output.outputs),
    ]


def _positions(logprobs: Sequence[dict[int, Logprob] | None] | None) -> Any:
    if logprobs is None:
        return None
    return [
        None
        if at is None
        else (
            list(at),
            [each.rank for each in at.values()],
            array("d", [each.logprob for each in at.values()]).tobytes(),
        )
        for at in logprobs
    ]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", lengths(20))
@pytest.mark.parametrize(("name", "dtype", "quantization"), MODELS)
def test_any_requests(tiny: Models, name: str, dtype: str, quantization: str | None, count: int) -> None:
    path, options = tiny.directory(name), {"dtype": dtype, "quantization": quantization}
    rng = np.random.default_rng(count)
    with engine(path, **options, max_num_seqs=1, enable_prefix_caching=False) as llm:
        requests = make_requests(rng, count, llm.source.config.vocab_size)
        alone = [bits(llm.generate([prompt], params)[0]) for prompt, params in requests]
        assert llm.core.scheduler.counters.hit == llm.core.scheduler.counters.preemptions == 0
    prompts, params = [prompt for prompt, _ in requests], [each for _, each in requests]
    for tp in (1, 2):
        with busy(path, tp, **options) as llm:
            for number, output in enumerate(llm.generate(prompts, params)):
                assert bits(output) == alone[number], f"tp {tp}, request {number}: {params[number]}"
            counters = llm.core.scheduler.counters
            assert counters.hit >= BLOCK * count // 4 and counters.preemptions >= count // 10, counters
            assert llm.core.scheduler.pool.free == BLOCKS
            llm.core.scheduler.pool.check()


def test_a_known_prefix_saves_four_fifths(tiny: Models, tmp_path: Path) -> None:
    """Of a prompt with a known beginning of 1,000 tokens, only the rest is computed; the answer is the same."""
    path = tiny.copy("llama-tied", tmp_path)
    with edited_json(path / "config.json") as config:
        config["max_position_embeddings"] = 2048
    prefix = [int(t) for t in np.random.default_rng(0).integers(0, 320, 1000)]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
    with engine(path, max_model_len=2048, max_num_batched_tokens=16) as llm:
        steps = []
        for rest in ([7, 8, 9], [10, 11], [7, 8, 9]):
            before = llm.core.steps
            found = bits(llm.generate([prefix + rest], params)[0])
            steps.append(llm.core.steps - before)
        first, second, again = steps
        assert first == -(-1003 // 16)
        assert 5 * max(second, again) <= first
    with engine(path, max_model_len=2048, enable_prefix_caching=False) as llm:
        assert bits(llm.generate([[*prefix, 7, 8, 9]], params)[0]) == found


def test_other_seeds_give_other_bits(tiny: Models) -> None:
    """The comparison can fail."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=8, logprobs=2, ignore_eos=True)
    with engine(tiny.directory("llama-uneven")) as llm:
        first, again, other = (bits(llm.generate([[5, 6, 7]], replace(params, seed=seed))[0]) for seed in (1, 1, 2))
    assert first == again != other
