"""Dummy weights as a GGUF file: what our own reader gets out of it is what went in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tiny_models import Models

from serried.bench import dummy_gguf
from serried.bench.dummy_gguf import TYPES, WIDE, write_dummy_gguf
from serried.errors import InputError
from serried.models.config import ModelConfig
from serried.models.decoder import Decoder
from serried.models.registry import open_model
from serried.parallel.comm import LocalComm
from serried.parallel.reduction import Span
from serried.weights.dummy import DummyCheckpoint
from serried.weights.load import tensor_shapes

NAMES = ["gguf-llama", "gguf-qwen3"]


def config_of(tiny: Models, name: str) -> ModelConfig:
    return open_model(str(tiny.directory(name))).config


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_round_trip(tiny: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    """Shapes, values and every number of the config; heads of a Llama are permuted on the way, and back."""
    monkeypatch.setattr(dummy_gguf, "ROWS", 80)  # no multiple of a head
    config, reports = config_of(tiny, name), []
    path = tmp_path / "new" / "model.gguf"
    write_dummy_gguf(path, config, name, kind, 3, lambda done, total: reports.append((done, total)))
    assert [each.name for each in path.parent.iterdir()] == ["model.gguf"]
    found = open_model(str(path))
    assert found.config == replace(config, bos_id=None, eos_ids=(), norm_eps=found.config.norm_eps)
    assert found.config.norm_eps == pytest.approx(config.norm_eps)

    model = Decoder(config, config.partition((1,)), LocalComm(), 1)
    shapes = tensor_shapes(model.parameters())
    expected = DummyCheckpoint(shapes, 3)
    checkpoint = found.checkpoint(list(model.parameters()), "auto", 0)
    assert {key: info.shape for key, info in checkpoint.tensors.items()} == dict(shapes)
    for key, shape in shapes.items():
        values: Any = expected.read(key, Span(0, shape[0])).astype(np.float32)
        wide = kind.startswith("Q4") and ("embed" in key or "lm_head" in key)
        stored = "F32" if len(shape) == 1 else WIDE if wide else kind
        assert checkpoint.tensors[key].format == stored
        if stored.startswith("Q"):
            values = dequantize(quantize(values, GGMLQuantizationType[stored]), GGMLQuantizationType[stored])
        assert np.array_equal(checkpoint.read(key, Span(0, shape[0])).astype(np.float32), values), key
    checkpoint.close()
    elements = sum(int(np.prod(shape)) for shape in shapes.values())
    assert reports[-1] == (elements, elements)
    assert len(reports) == len(shapes)


def test_rows_that_are_no_whole_blocks(tiny: Models, tmp_path: Path) -> None:
    """BF16 does not mind; nothing is left behind where it fails."""
    config = config_of(tiny, "llama-narrow")  # an MLP of 97 columns
    write_dummy_gguf(tmp_path / "a.gguf", config, "x", "BF16", 0, None)
    assert open_model(str(tmp_path / "a.gguf")).config.intermediate_size == 97
    with pytest.raises(InputError, match=r"o_proj.weight: rows of 120 .* Q8_0"):
        write_dummy_gguf(tmp_path / "b.gguf", config, "x", "Q8_0", 0, None)
    assert [each.name for each in tmp_path.iterdir()] == ["a.gguf"]


def test_what_the_file_cannot_say(tiny: Models, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="llama3"):
        write_dummy_gguf(tmp_path / "a.gguf", config_of(tiny, "gguf-rope3"), "x", "BF16", 0, None)
    for name in ("mistral-window", "qwen2", "gemma3", "phi3"):
        family = name.partition("-")[0]
        with pytest.raises(InputError, match=f"for llama and qwen3 models, not for {family}; give a .gguf file"):
            write_dummy_gguf(tmp_path / "a.gguf", config_of(tiny, name), "x", "BF16", 0, None)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tiny: Models, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InputError, match=r"a\.gguf: cannot be written"):
        write_dummy_gguf(tmp_path / "file" / "a.gguf", config_of(tiny, "gguf-qwen3"), "x", "BF16", 0, None)
