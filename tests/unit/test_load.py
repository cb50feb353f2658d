"""Loading: every rank's shard out of the bytes that it owns, and every tensor accounted for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import Models, edited_json

from serried.errors import CheckpointError
from serried.models.decoder import Decoder
from serried.models.registry import open_model
from serried.weights.load import load_parameters

SPLITS = [
    ("split-9-3", [1]),
    ("split-9-3", [1] * 4),
    ("split-5", [1, 1, 1]),
    ("split-9-3", [3, 1]),
    ("split-4-1", [1] * 4),
]


class Room:
    """A Destination that notices what is written twice, or not at all."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.array = np.zeros(shape, dtype)
        self.written = np.zeros(shape[0], int)

    def write(self, row: int, values: Any) -> None:
        self.array[row : row + len(values)] = values
        self.written[row : row + len(values)] += 1

    def finish(self) -> Any:
        assert (self.written == 1).all()
        return self.array


class NumpyBackend:
    """A backend that only holds weights, in float32 or bfloat16."""

    def __init__(self, dtype: Any = np.float32) -> None:
        self.dtype = dtype

    def destination(self, shape: tuple[int, ...], kind: str) -> Room:
        return Room(shape, np.float32 if kind == "vector" else self.dtype)


def load(path: Path, weights: Sequence[int] = (1,), rank: int = 0, **options: Any) -> SimpleNamespace:
    """One rank's decoder with its weights, its checkpoint, and how far the progress came."""
    source = open_model(str(path))
    comm: Any = SimpleNamespace(rank=rank, size=len(weights))
    model = Decoder(source.config, source.config.partition(weights), comm, max_positions=1)
    parameters = list(model.parameters())
    checkpoint = source.checkpoint(parameters, "auto", 0)
    progress: list[tuple[int, int]] = []
    backend: Any = NumpyBackend(**options)
    try:
        load_parameters(
            parameters, checkpoint, backend, ignored=source.ignores, progress=lambda *at: progress.append(at)
        )
    finally:
        checkpoint.close()
    return SimpleNamespace(model=model, parameters=parameters, checkpoint=checkpoint, progress=progress)


@pytest.mark.parametrize(("name", "weights"), SPLITS)
def test_the_shards_make_up_the_whole(tiny: Models, name: str, weights: list[int]) -> None:
    """Every element of every tensor is on the rank that owns it, and is the file's."""
    whole = {key: value.float().numpy() for key, value in tiny.model(name).state_dict().items()}
    seen = {key: np.zeros(value.shape, int) for key, value in whole.items()}
    for rank in range(len(weights)):
        for parameter in load(tiny.directory(name), weights, rank).parameters:
            row = 0
            for piece in parameter.spec.pieces:
                rows, columns = piece.rows, piece.columns
                at = np.s_[rows.start : rows.stop]
                both = at if columns is None else (at, np.s_[columns.start : columns.stop])
                assert np.array_equal(parameter.value[row : row + rows.size], whole[piece.tensor][both])
                seen[piece.tensor][both] += 1
                row += rows.size
    tied = "lm_head.weight" if tiny.model(name).config.tie_word_embeddings else None
    for key, count in seen.items():
        if key != tied:
            assert count.min() >= 1, key
        if "k_proj" not in key and "v_proj" not in key and count.ndim == 2:
            assert count.max() <= 1, key  # only KV heads may be on two ranks


@pytest.mark.parametrize("name", ["split-9-3", "split-5"])
def test_a_rank_reads_no_more_than_it_owns(tiny: Models, name: str) -> None:
    ranks = [load(tiny.directory(name), [1] * 4, rank) for rank in range(4)]
    for rank in ranks:
        assert rank.checkpoint.bytes_read == 4 * sum(p.elements for p in rank.parameters)
    whole = load(tiny.directory(name)).checkpoint.bytes_read
    vectors = 4 * sum(p.elements for p in ranks[0].parameters if p.kind == "vector")
    total = sum(rank.checkpoint.bytes_read for rank in ranks)
    shared_kv = total - whole - 3 * vectors
    assert 0 <= shared_kv <= 0.1 * whole
    if name == "split-9-3":
        assert max(rank.checkpoint.bytes_read for rank in ranks) < 0.4 * whole


def test_bytes_of_a_gguf(tiny: Models) -> None:
    path = tiny.gguf("gguf-llama", "Q8_0")
    whole = load(path).checkpoint.bytes_read
    halves = [load(path, [1, 1], rank).checkpoint.bytes_read for rank in range(2)]
    assert max(halves) < 0.65 * whole  # 5 units of vocabulary: 3 and 2
    assert whole <= sum(halves) < 1.1 * whole


def test_progress_ends_at_all(tiny: Models) -> None:
    loaded = load(tiny.directory("split-9-3"), [1, 1], 1)
    assert loaded.progress == sorted(loaded.progress)
    assert loaded.progress[-1] == (loaded.progress[0][1],) * 2 == (sum(p.elements for p in loaded.parameters),) * 2


def test_rounding_to_bfloat16(tiny: Models) -> None:
    """To the nearest, ties to even, as torch does; vectors stay float32."""
    loaded = load(tiny.directory("llama-biases"), dtype=ml_dtypes.bfloat16)
    state = tiny.model("llama-biases").state_dict()
    for parameter in loaded.parameters:
        (first, *_), value = parameter.spec.pieces, parameter.value
        wanted = state[first.tensor]
        if parameter.kind != "vector":
            assert value.dtype == ml_dtypes.bfloat16
            wanted = wanted.bfloat16().float()
        assert np.array_equal(value[: first.rows.size].astype(np.float32), wanted.numpy())


def test_shards_of_a_checkpoint(tiny: Models) -> None:
    loaded = load(tiny.directory("llama-shards"), [1, 1], 0)
    assert loaded.checkpoint.bytes_read == 4 * sum(p.elements for p in loaded.parameters)


def change(weights: dict[str, Any], how: str) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    if how == "missing":
        del weights[name]
    elif how == "left over":
        weights["model.layers.2.mlp.down_proj.weight"] = weights[name].clone()
    elif how == "bias left over":
        weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
    elif how == "transposed":
        weights[name] = weights[name].T.contiguous()
    elif how == "padded head":
        weights["lm_head.weight"] = torch.zeros(320, 64)
    elif how == "one dimension more":
        weights["model.norm.weight"] = torch.ones(64, 1)
    else:
        weights[name] = weights[name].to(getattr(torch, how))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "model.layers.1.mlp.down_proj.weight of shape [64, 173] is missing"),
        ("left over", "model.layers.2.mlp.down_proj.weight of shape [64, 173] is left over"),
        ("bias left over", "model.layers.0.self_attn.q_proj.bias of shape [128] is left over"),
        ("transposed", "model.layers.1.mlp.down_proj.weight has shape [173, 64]; the model's config wants [64, 173]"),
        ("padded head", "lm_head.weight has shape [320, 64]; the model's config wants [301, 64]"),
        ("one dimension more", "model.norm.weight has shape [64, 1]; the model's config wants [64]"),
        ("float64", "'model.layers.1.mlp.down_proj.weight': dtype F64 cannot be read"),
        ("int8", "'model.layers.1.mlp.down_proj.weight': dtype I8 cannot be read"),
        ("float8_e4m3fn", "'model.layers.1.mlp.down_proj.weight': dtype F8_E4M3 cannot be read"),
    ],
)
def test_a_tensor_that_does_not_fit(tiny: Models, how: str, said: str, tmp_path: Path) -> None:
    path = tiny.copy("llama-untied", tmp_path)
    file = path / "model.safetensors"
    weights = load_file(file)
    change(weights, how)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{file}: tensor ")
    assert said in str(caught.value)


def test_a_missing_shard_and_a_missing_tensor_of_shards(tiny: Models, tmp_path: Path) -> None:
    path = tiny.copy("llama-shards", tmp_path)
    shard = sorted(path.glob("model-*.safetensors"))[1]
    weights = load_file(shard)
    name = min(weights)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} does not exist"):
        load(path)
    del weights[name]
    save_file(weights, shard, {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert shard.name in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("cut", [1, 1000, 100_000])
def test_a_truncated_file(tiny: Models, cut: int, tmp_path: Path) -> None:
    """Never read as zeros: found before anything is loaded, on every rank."""
    path = tiny.copy("split-9-3", tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    for rank in (0, 1):
        with pytest.raises(CheckpointError, match=str(file)) as caught:
            load(path, [1, 1], rank)
        assert "tensor" in str(caught.value)


def test_a_truncated_gguf(tiny: Models, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny.gguf("gguf-qwen3").read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match=str(path)) as caught:
        load(path)
    assert "tensor" in str(caught.value)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "pytorch_model-00001-of-00002.bin"])
def test_pickles_are_refused(tiny: Models, file: str, tmp_path: Path) -> None:
    path = tiny.copy("llama-untied", tmp_path)
    (path / "model.safetensors").rename(path / file)
    with pytest.raises(CheckpointError, match="pickles") as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_a_config_that_is_larger_than_the_file(tiny: Models, tmp_path: Path) -> None:
    path = tiny.copy("llama-untied", tmp_path)
    with edited_json(path / "config.json") as config:
        config["num_hidden_layers"] = 3
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.2\.\S+ of shape .* is missing"):
        load(path)


def test_large_tensors_come_in_chunks(tiny: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk at a time, of any size, gives the same shard."""
    wanted = load(tiny.directory("split-9-3"), [1, 1, 1], 1).parameters
    for size in (1, 1000, 4096):
        monkeypatch.setattr("serried.weights.load.CHUNK_BYTES", size)
        got = load(tiny.directory("split-9-3"), [1, 1, 1], 1)
        assert all(np.array_equal(a.value, b.value) for a, b in zip(got.parameters, wanted, strict=True))
        assert len(got.progress) > len(wanted)


def counted(model: str, weights: Sequence[int]) -> list[int]:
    config = open_model(model).config
    partition = config.partition(weights)
    ranks: list[Any] = [SimpleNamespace(rank=rank, size=len(weights)) for rank in range(len(weights))]
    return [sum(p.elements for p in Decoder(config, partition, rank, 1).parameters()) for rank in ranks]


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-32b", 32_762_123_264),
        ("llama-3.1-8b", 8_030_261_248),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_parameters_of_the_presets(preset: str, parameters: int) -> None:
    assert counted(preset, [1]) == [parameters]


def test_parameters_of_a_rank() -> None:
    """Golden numbers: half of the matrices, all of the norms."""
    assert counted("qwen3-0.6b", [1, 1]) == [298_057_728] * 2
    heads = open_model("qwen3-0.6b").config.partition([1, 1])
    assert [heads.kv_heads_of(rank).size for rank in (0, 1)] == [4, 4]


@pytest.mark.parametrize("sizes", [lambda p: p.shape, lambda p: p.spec.shape])
def test_a_parameter_knows_its_size(tiny: Models, sizes: Callable[[Any], tuple[int, ...]]) -> None:
    for parameter in load(tiny.directory("split-9-3"), [2, 1], 0).parameters:
        assert parameter.value.shape == sizes(parameter)
        assert math.prod(sizes(parameter)) == parameter.elements
