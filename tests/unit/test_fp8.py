"""Checkpoints of eight-bit floats: dequantized to torch's numbers, the same for every slice, and refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_load import load
from tiny_models import Models, edited_json

from serried.errors import CheckpointError, InputError
from serried.models.fp8_config import fp8_from_hf
from serried.models.registry import open_model
from serried.parallel.reduction import Span
from serried.weights.fp8 import Fp8Checkpoint
from serried.weights.safetensors import SafetensorsCheckpoint

FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BLOCK = (16, 24)
ROWS, COLUMNS = 70, 101
Scaled = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # eight-bit floats, their scales, what they stand for


def quantize(weight: torch.Tensor, strategy: str, dtype: torch.dtype, block: tuple[int, int] = BLOCK) -> Scaled:
    """Scale what shares a scale to the range of the type; the scales as the strategy's files shape them."""
    rows, columns = weight.shape
    height, width = {"tensor": (rows, columns), "channel": (1, columns), "block": block}[strategy]
    padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    scales = blocks.abs().amax((1, 3)) / torch.finfo(dtype).max
    full = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    stored = (weight / full).to(dtype)
    shaped = scales.reshape(()) if strategy == "tensor" else scales
    return stored, shaped, stored.float() * full


@pytest.fixture(scope="module", params=[(s, f) for s in ("tensor", "channel", "block") for f in FLOATS])
def scaled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A file with one tensor of each of two names for the scale, and the tensor's values."""
    strategy, kind = request.param
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    stored, scale, values = quantize(weight, strategy, FLOATS[kind])
    assert (values - weight).abs().mean() < 0.1 * weight.abs().mean()
    path = tmp_path_factory.mktemp("fp8") / "model.safetensors"
    tensors = {
        "a.weight": stored,
        "a.weight_scale_inv": scale,
        "b.weight": stored.clone(),
        "b.weight_scale": scale.clone(),
    }
    save_file({**tensors, "b.input_scale": torch.ones(1), "c.weight": weight.bfloat16()}, path)
    return path, values.numpy()


def open_checkpoint(path: Path, block: tuple[int, int] | None = BLOCK) -> Fp8Checkpoint:
    return Fp8Checkpoint(SafetensorsCheckpoint(path), block)


def test_values_are_torchs(scaled: tuple[Path, Any]) -> None:
    path, values = scaled
    checkpoint = open_checkpoint(path)
    assert {name: info.format[:2] for name, info in checkpoint.tensors.items()} == {
        "a.weight": "F8", "b.weight": "F8", "c.weight": "BF",
    }  # fmt: skip
    for name in ("a.weight", "b.weight"):
        read = checkpoint.read(name, Span(0, ROWS))
        assert read.dtype == np.float32
        assert np.array_equal(read, values)
    assert str(checkpoint.read("c.weight", Span(0, 1)).dtype) == "bfloat16"
    checkpoint.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_slice_has_the_same_values(scaled: tuple[Path, Any], data: Any) -> None:
    path, values = scaled
    rows = Span(*sorted(data.draw(st.tuples(*[st.integers(0, ROWS)] * 2))))
    columns = Span(*sorted(data.draw(st.tuples(*[st.integers(0, COLUMNS)] * 2)))) if data.draw(st.booleans()) else None
    checkpoint = open_checkpoint(path)
    read = checkpoint.read("a.weight", rows, columns)
    assert np.array_equal(read, values[slice(*rows), slice(*(columns or (0, COLUMNS)))])
    scales = checkpoint.bytes_read - read.size
    assert 0 <= scales <= 4 * ROWS
    checkpoint.close()


def write(path: Path, **tensors: torch.Tensor) -> Path:
    """A file of a.weight, 32 x 48, in eight-bit floats, and these tensors beside it."""
    save_file({"a.weight": torch.ones(32, 48).to(torch.float8_e4m3fn), **tensors}, path / "model.safetensors")
    return path / "model.safetensors"


def test_a_scale_is_missing_or_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tensor 'a\.weight': its scale, a\.weight_scale_inv or .* is missing"):
        open_checkpoint(write(tmp_path))
    for shape in ((2, 3), (1, 48), (48,), (3, 2), (2, 2, 1)):
        path = write(tmp_path, **{"a.weight_scale": torch.ones(shape)})
        with pytest.raises(CheckpointError, match=r"tensor 'a\.weight_scale': shape .* does not fit a\.weight"):
            open_checkpoint(path, None)
    assert open_checkpoint(write(tmp_path, **{"a.weight_scale": torch.ones(2, 2)})).tensors
    # A second scale, and one of nothing, are left over for the loader to complain of.
    spare = {"a.weight_scale": torch.ones(1), "a.weight_scale_inv": torch.ones(1), "b.weight_scale": torch.ones(1)}
    assert set(open_checkpoint(write(tmp_path, **spare)).tensors) == {"a.weight", "a.weight_scale", "b.weight_scale"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite(value: float, tmp_path: Path) -> None:
    scale = torch.ones(32, 1)
    scale[5] = value
    checkpoint = open_checkpoint(write(tmp_path, **{"a.weight_scale": scale}))
    with pytest.raises(CheckpointError, match=rf"tensor 'a\.weight_scale': element \[5, 0\] is {value}"):
        checkpoint.read("a.weight", Span(0, 1))


def test_a_scale_of_another_dtype(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, **{"a.weight_scale": torch.full((1,), 0.5).bfloat16()}))
    assert (checkpoint.read("a.weight", Span(0, 2), Span(3, 5)) == 0.5).all()
    checkpoint = open_checkpoint(write(tmp_path, **{"a.weight_scale": torch.ones(1, dtype=torch.int32)}))
    with pytest.raises(CheckpointError, match=r"tensor 'a\.weight_scale': dtype I32 cannot be read"):
        checkpoint.read("a.weight", Span(0, 1))


WEIGHTS = {"type": "float", "num_bits": 8, "symmetric": True, "strategy": "channel"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"0": {"weights": WEIGHTS}},
}


def compressed(**changes: Any) -> dict[str, Any]:
    return {**COMPRESSED, "config_groups": {"0": {"weights": {**WEIGHTS, **changes}}}}


@pytest.mark.parametrize(
    ("config", "block"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, (128, 128)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, None),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, None),
        (COMPRESSED, None),
        (compressed(strategy="tensor"), None),
        (compressed(strategy="block", block_structure=[128, 64]), (128, 64)),
        (compressed(strategy="block", block_structure="128x64"), (128, 64)),
    ],
)
def test_what_a_config_says(config: dict[str, Any], block: tuple[int, int] | None) -> None:
    found = fp8_from_hf({"quantization_config": config}, "config.json")
    assert found is not None and found.block == block
    assert fp8_from_hf({"quantization_config": None}, "") is fp8_from_hf({}, "") is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        *[
            ({"quant_method": method}, f"quant_method '{method}'")
            for method in ("gptq", "awq", "bitsandbytes", "mxfp4")
        ],
        ({}, "quant_method None"),
        ("fp8", "expected an object"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "the size of a block is [128]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "the size of a block is [0, 128]"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "the size of a block is 128"),
        ({**COMPRESSED, "format": "pack-quantized"}, "format 'pack-quantized'"),
        ({**COMPRESSED, "config_groups": {}}, "format 'float-quantized'"),
        ({**COMPRESSED, "config_groups": {"0": {}}}, "None"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (compressed(type="int"), "('int', 8, True)"),
        (compressed(num_bits=4), "('float', 4, True)"),
        (compressed(symmetric=False), "('float', 8, False)"),
        (compressed(strategy="group", group_size=32), "strategy 'group'"),
    ],
)
def test_other_methods_are_refused_by_name(config: Any, said: str) -> None:
    with pytest.raises(InputError, match=r"^dir/config\.json: quantization_config: ") as caught:
        fp8_from_hf({"quantization_config": config}, "dir/config.json")
    assert said in str(caught.value)


def quantized_copy(tiny: Models, name: str, to: Path, strategy: str, suffix: str, config: dict[str, Any]) -> Path:
    """A checkpoint with its projections in eight-bit floats, and one beside it that holds what they stand for."""
    path, plain = tiny.copy(name, to), tiny.copy(name, to / "plain")
    tensors = load_file(path / "model.safetensors")
    values = dict(tensors)
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        tensors[key], tensors[key + suffix], values[key] = quantize(tensors[key], strategy, torch.float8_e4m3fn)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    with edited_json(path / "config.json") as edited:
        edited["quantization_config"] = config
    return path


@pytest.mark.parametrize(
    ("strategy", "suffix", "config"),
    [
        ("block", "_scale_inv", {"quant_method": "fp8", "weight_block_size": list(BLOCK)}),
        ("channel", "_scale", COMPRESSED),
        ("tensor", "_scale", {"quant_method": "fp8", "activation_scheme": "static"}),
    ],
)
def test_a_model_answers_as_its_dequantized_self(
    tiny: Models, tmp_path: Path, strategy: str, suffix: str, config: dict[str, Any]
) -> None:
    """Split over ranks whose edges cut blocks: every parameter has the values of the plain checkpoint."""
    path = quantized_copy(tiny, "split-9-3", tmp_path, strategy, suffix, config)
    for rank in range(3):
        quantized = load(path, [1, 1, 1], rank).parameters
        plain = load(tmp_path / "plain" / path.name, [1, 1, 1], rank).parameters
        assert all(np.array_equal(a.value, b.value) for a, b in zip(quantized, plain, strict=True))


def test_a_weight_that_is_not_a_number(tiny: Models, tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    path = quantized_copy(tiny, "split-9-3", tmp_path, "block", "_scale_inv", config)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name].view(torch.uint8)[17, 3] = 0x7F
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"tensor '{name}': element \[17, 3\] is nan"):
        load(path)


def test_without_its_config_such_a_checkpoint_is_refused(tiny: Models, tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    path = quantized_copy(tiny, "split-9-3", tmp_path, "block", "_scale_inv", config)
    with edited_json(path / "config.json") as edited:
        del edited["quantization_config"]
    with pytest.raises(CheckpointError, match=r"tensor '\S+_proj\.weight': dtype F8_E4M3 cannot be read"):
        load(path)
    with edited_json(path / "config.json") as edited:
        edited["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(InputError, match=r"config\.json: quantization_config: quant_method 'gptq' is not supported"):
        open_model(str(path))


def test_a_file_of_a_real_layout(tmp_path: Path) -> None:
    """The header as such files have it, written by hand: [256, 200] in blocks of 128, the last ones short."""
    weight = np.arange(256 * 200, dtype=np.uint32).astype(np.uint8) & 0x77
    scales = np.array([[1, 2], [4, 8]], np.float32)
    header = {
        "w.weight": {"dtype": "F8_E4M3", "shape": [256, 200], "data_offsets": [0, 51200]},
        "w.weight_scale_inv": {"dtype": "F32", "shape": [2, 2], "data_offsets": [51200, 51216]},
    }
    raw = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + weight.tobytes() + scales.tobytes())
    read = open_checkpoint(path, (128, 128)).read("w.weight", Span(100, 200), Span(120, 150))
    plain = torch.from_numpy(weight.reshape(256, 200)).view(torch.float8_e4m3fn).float().numpy()[100:200, 120:150]
    factors = np.repeat(np.repeat(scales, 128, 0)[100:200], [8, 22], axis=1)
    assert np.array_equal(read, plain * factors)
