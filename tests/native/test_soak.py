"""Long runs. The suite runs a twentieth of each; `make soak` runs them whole."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from test_exact import LENGTHS, alone, logits_of, make_requests, open_engines, same_bits
from tiny_models import Models

from serried import LLM, SamplingParams


def lengths(suite: int) -> list[object]:
    """A twentieth for the suite, the whole for `make soak`."""
    return [suite, pytest.param(20 * suite, marks=pytest.mark.soak)]


def children() -> set[str]:
    """Processes whose parent this one is."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if fields[1] == str(os.getpid()):
            found.add(entry.parent.name)
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cycles", lengths(3))
def test_start_and_stop(tiny: Models, cycles: int) -> None:
    """Engines come and go: no process stays, no descriptor, and the answer is always the same."""
    path = str(tiny.directory("llama-uneven"))
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=8)
    before, answers, descriptors = children(), set(), []
    for cycle in range(cycles):
        with LLM(path, tensor_parallel_size=1 + cycle % 3, dtype="bfloat16", max_model_len=64) as llm:
            answers.add(tuple(llm.generate([[3, 1, 4, 1, 5]], params)[0].outputs[0].token_ids))
        descriptors.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208
    assert len(answers) == 1
    assert children() == before
    assert descriptors[-1] <= descriptors[0] + 2


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rounds", lengths(6))
def test_any_company_any_chunks(tiny: Models, rounds: int) -> None:
    """Random batches in random chunks, on every split: the bits of each request alone."""
    rng = np.random.default_rng(rounds)
    with ExitStack() as stack:
        engines = open_engines(str(tiny.directory("qwen3-mha")), "bfloat16", None, stack)
        for _ in range(rounds):
            name = str(rng.choice(list(engines.engines)))
            batch = [int(n) for n in rng.choice(LENGTHS, rng.integers(1, 7))]
            chunk = int(rng.integers(1, 100))
            executor = engines.engines[name]
            found = logits_of(executor, make_requests(executor, batch, engines.vocab), chunk)
            for length, logits in zip(batch, found, strict=True):
                assert same_bits(logits, alone(engines, length)), f"{name}, chunks of {chunk}, {batch}"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", lengths(60))
def test_streamed_is_whole(tiny: Models, count: int) -> None:
    """Random generations, with stop strings and cuts: the pieces of a stream, joined, are the whole answer."""
    rng = np.random.default_rng(count)
    with LLM(str(tiny.directory("split-text")), dtype="bfloat16", max_model_len=128) as llm:
        assert llm.tokenizer is not None
        for seed in range(count):
            params = SamplingParams(
                temperature=float(rng.choice([0.0, 0.7, 1.5])),
                top_k=int(rng.choice([0, 5, 40])),
                top_p=float(rng.choice([1.0, 0.9, 0.5])),
                seed=seed,
                max_tokens=int(rng.integers(1, 40)),
                stop=[str(s) for s in rng.choice(["the", "a", " ", "zq", "o"], rng.integers(0, 3), replace=False)],
            )
            prompt = [int(t) for t in rng.integers(3, llm.source.config.vocab_size, rng.integers(1, 60))]
            pieces = list(llm.stream([prompt], params))
            answer = pieces[-1].output.outputs[0]
            assert "".join(piece.text for piece in pieces) == answer.text
            whole = llm.generate([prompt], params)[0].outputs[0]
            assert (whole.text, whole.token_ids, whole.finish_reason) == (
                answer.text, answer.token_ids, answer.finish_reason
            )  # fmt: skip
            assert not any(stop in answer.text for stop in params.stop)
