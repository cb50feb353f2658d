"""The reference of `verify` against transformers: every family and every kind of RoPE, unsplit, without the engine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import BASE, SPECS, Models, fill, in_dtype

from serried import LLM, SamplingParams
from serried.models.decoder import Decoder
from serried.models.registry import ModelSource, open_model
from serried.parallel.comm import LocalComm
from serried.verify.reference import Reference

LENGTH = 80
NAMES = [name for name in SPECS if not name.startswith("split-")]


def reference_logits(source: ModelSource, prompt: list[int]) -> np.ndarray:
    model = Decoder(source.config, source.config.partition((1,)), LocalComm(), max_positions=1)
    checkpoint = source.checkpoint(list(model.parameters()), "auto", 0)
    reference = Reference(source.config, checkpoint, 1, longest=len(prompt), ignored=source.ignores)
    checkpoint.close()
    return reference.logits(prompt)


@torch.inference_mode()
def transformers_logits(model: Any, prompt: list[int]) -> np.ndarray:
    logits: np.ndarray = model(torch.tensor([prompt])).logits[0].numpy()
    return logits


def prompt_below(size: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(5).integers(0, size, LENGTH)]


@pytest.mark.parametrize("name", NAMES)
def test_reference(tiny: Models, name: str) -> None:
    path = tiny.gguf(name) if name.startswith("gguf-") else tiny.directory(name)
    model = in_dtype(tiny.model(name), "float32")
    prompt = prompt_below(model.config.vocab_size)
    wanted = transformers_logits(model, prompt)
    assert np.abs(reference_logits(open_model(str(path)), prompt) - wanted).max() < 1e-4


def test_the_decoder_of_a_model_that_sees_images(tmp_path: Path) -> None:
    """Its config is nested, its tensors are named otherwise, and those that see images are left where they are."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    of_text = {**BASE, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 7, "sliding_window_pattern": 2}
    of_images = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=of_text, vision_config={**of_images, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            fill(name, value, 0.0)
    model.save_pretrained(tmp_path)
    prompt = prompt_below(of_text["vocab_size"])
    wanted = transformers_logits(copy.deepcopy(model), prompt)
    source = open_model(str(tmp_path))
    assert np.abs(reference_logits(source, prompt) - wanted).max() < 1e-4
    with LLM(str(tmp_path), dtype="float32", backend="torch", max_model_len=128) as llm:
        output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1))[0].outputs[0]
    assert output.token_ids[0] == int(wanted[-1].argmax())
