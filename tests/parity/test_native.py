"""The native backend against transformers: float32 to the digit, bfloat16 no worse than transformers in bfloat16."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tiny_models import SPECS, Models

from serried._native import available
from serried.config import EngineConfig
from serried.engine.batch import build_step
from serried.engine.executor import create_executor
from serried.engine.request import Request
from serried.engine.scheduler import Scheduled
from serried.models.registry import open_model
from serried.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not available(), reason="Serried was installed without its extension")
LENGTH = 48
NAMES = [name for name in SPECS if "longest" not in name]


def native_logits(path: str, dtype: str, prompt: list[int]) -> np.ndarray:
    executor = create_executor(EngineConfig.create(path, dtype=dtype, backend="native"), open_model(path))
    request = Request(0, prompt, SamplingParams(temperature=0, max_tokens=1), 0)
    request.blocks = executor.new_pool().take(-(-len(prompt) // executor.config.block_size)) or []
    step = build_step([Scheduled(request, 0, len(prompt))], executor.config.block_size, whole_logits=True)
    try:
        return executor.execute(step).logits
    finally:
        executor.close()


@pytest.mark.parametrize("name", NAMES)
def test_float32(tiny: Models, name: str) -> None:
    model = copy.deepcopy(tiny.model(name)).float()
    prompt = [int(t) for t in np.random.default_rng(3).integers(0, model.config.vocab_size, LENGTH)]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].float().numpy()
    assert np.abs(native_logits(str(tiny.directory(name)), "float32", prompt) - expected).max() < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_no_worse_than_transformers(tiny: Models, name: str) -> None:
    rounded = copy.deepcopy(tiny.model(name)).to(torch.bfloat16)
    exact = copy.deepcopy(rounded).float()
    prompt = [int(t) for t in np.random.default_rng(3).integers(0, exact.config.vocab_size, LENGTH)]
    with torch.inference_mode():
        expected = exact(torch.tensor([prompt])).logits[0].numpy()
        theirs = rounded(torch.tensor([prompt])).logits[0].float().numpy()
    ours = native_logits(str(tiny.directory(name)), "bfloat16", prompt)
    # Of two layers and some hundred logits the largest error is a matter of luck; the typical one is not.
    assert rms(ours - expected) <= rms(theirs - expected)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x.astype(np.float64)).mean()))
