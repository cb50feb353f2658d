"""Engines over real ranks, and what tests on either backend ask of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from serried import LLM, SamplingParams
from serried.parallel.launch import RankProcesses

PROMPTS = [[int(i) for i in np.random.default_rng(n).integers(0, 100, n)] for n in (23, 4, 61, 1)]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 20},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "all": {"temperature": 1.3, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    "edited": {
        "temperature": 0.9,
        "presence_penalty": 0.4,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.3,
        "logit_bias": {3: 1.5, 7: -4.0, 70: 2.0},
        "bad_words": [[11], [12, 13]],
        "min_tokens": 4,
    },
}


def open_llm(path: Path, tp: int, backend: str, **options: Any) -> LLM:
    settings = {"dtype": "float32", "backend": backend, "block_size": 16, "threads_per_rank": 1}
    return LLM(str(path), tp, **{**settings, "max_num_batched_tokens": 19, **options})


def processes(llm: LLM) -> RankProcesses:
    return llm.executor.processes  # type: ignore[attr-defined]


def tokens(llm: LLM, prompts: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def sampled(kind: str, seed: int | None = 11, **more: Any) -> SamplingParams:
    return SamplingParams(**{**SAMPLED[kind], "seed": seed, "max_tokens": 12, "ignore_eos": True, **more})


def among_others(llm: LLM, params: SamplingParams) -> list[Any]:
    """What each step gives a request that shares its steps with others, before and behind it.

    The others choose in other ways, with and without a seed, and score their prompts.
    """
    core = llm.core
    words = [word for word in params.bad_words if not isinstance(word, str)]
    core.add(PROMPTS[1], SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True, prompt_logprobs=1))
    core.add(PROMPTS[2], SamplingParams(temperature=0.7, top_k=9999999, max_tokens=5, seed=11, prompt_logprobs=0))
    request = core.add(PROMPTS[0], params, bad_words=words)
    core.add(PROMPTS[0], SamplingParams(temperature=0, max_tokens=9, logprobs=3))
    core.add(PROMPTS[3], SamplingParams(temperature=9.0, top_p=0.99, max_tokens=9, presence_penalty=2.0))
    core.add(PROMPTS[0], SamplingParams(temperature=1.0, min_p=0.5, max_tokens=9, allowed_token_ids=[1, 2]))
    given = []
    while not core.idle:
        given += [new for new in core.step() if new.request is request]
    assert [new.token for new in given] == request.output
    return given
