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
from tiny_gguf import MIXED
from tiny_models import Models, edited_json

from serried.errors import CheckpointError
from serried.models.decoder import Decoder
from serried.models.registry import open_model
from serried.quant.int8 import INT8
from serried.quant.rows import quantize_rows
from serried.weights.load import describe_methods, load_parameters

SPLITS = [
    ("split-9-3", [1]),
    ("split-9-3", [1] * 4),
    ("split-5", [1, 1, 1]),
    ("split-9-3", [3, 1]),
    ("split-4-1", [1] * 4),
]


class Room:
    """A Destination that notices what is written twice, or not at all. Of a method it holds the numbers."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, method: Any) -> None:
        self.array = np.zeros(shape, dtype)
        self.method = method
        self.written = np.zeros(shape[0], int)

    def write(self, row: int, values: Any) -> None:
        if self.method is not None:
            values = quantize_rows(self.method, values).values()
        self._put(row, values)

    def write_blocks(self, row: int, rows: Any) -> None:
        assert rows.method is self.method
        self._put(row, rows.values())

    def _put(self, row: int, values: Any) -> None:
        self.array[row : row + len(values)] = values
        self.written[row : row + len(values)] += 1

    def finish(self) -> Any:
        assert (self.written == 1).all()
        return self.array


class NumpyBackend:
    """A backend that only holds weights, in float32 or bfloat16."""

    def __init__(self, dtype: Any = np.float32) -> None:
        self.dtype = dtype

    def destination(self, shape: tuple[int, ...], kind: str, method: Any = None) -> Room:
        return Room(shape, np.float32 if kind == "vector" else self.dtype, method)


def load(
    path: Path, weights: Sequence[int] = (1,), rank: int = 0, quantization: str | None = None, **options: Any
) -> SimpleNamespace:
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
            parameters,
            checkpoint,
            backend,
            quantization=quantization,
            ignored=source.ignores,
            progress=lambda *at: progress.append(at),
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


def resave(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The checkpoint with its tensors changed."""
    file = path / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})
    return file


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_a_tied_model_whose_file_holds_a_head(tiny: Models, tmp_path: Path) -> None:
    """One that is the embedding, in either's place or in both; what a rank holds is the same."""
    path = tiny.copy("split-9-3", tmp_path)
    wanted = load(path, [1, 1], 1)
    resave(path, lambda weights: weights.update({HEAD: weights[EMBEDDING].clone()}))
    both = load(path, [1, 1], 1)
    resave(path, lambda weights: weights.pop(EMBEDDING))
    head = load(path, [1, 1], 1)
    for other in (both, head):
        assert all(np.array_equal(a.value, b.value) for a, b in zip(other.parameters, wanted.parameters, strict=True))
    own_rows = wanted.model.embedding.weight.value.nbytes
    assert both.checkpoint.bytes_read - own_rows == wanted.checkpoint.bytes_read == head.checkpoint.bytes_read


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda head: head.index_fill_(0, torch.tensor([448]), 0.5), "is not equal to model.embed_tokens.weight"),
        (lambda head: head[:-1].clone(), "is not model.embed_tokens.weight, F32 [449, 64]"),
        (lambda head: head.bfloat16(), "is not model.embed_tokens.weight, F32 [449, 64]"),
    ],
)
def test_a_tied_model_whose_head_is_another(
    tiny: Models, tmp_path: Path, change: Callable[[Any], Any], said: str
) -> None:
    """transformers would take both as they are; a loader that ignores one of them would answer wrongly."""
    path = tiny.copy("split-9-3", tmp_path)
    file = resave(path, lambda weights: weights.update({HEAD: change(weights[EMBEDDING].clone())}))
    with pytest.raises(CheckpointError) as caught:
        load(path, [1, 1], 1)
    assert str(caught.value).startswith(f"{file}: tensor 'lm_head.weight': {said}: config.json says")
    assert "set tie_word_embeddings to false" in str(caught.value)


def test_an_untied_model_without_a_head(tiny: Models, tmp_path: Path) -> None:
    path = tiny.copy("llama-untied", tmp_path)
    resave(path, lambda weights: weights.pop(HEAD))
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.weight' is missing.* set tie_word_embeddings to true"):
        load(path)


def test_several_dtypes_in_one_file(tiny: Models, tmp_path: Path) -> None:
    """Also within one parameter: what is stacked is float32, or rounded from each piece's own numbers."""
    path = tiny.copy("llama-biases", tmp_path)
    dtypes = {
        "q_proj": torch.float16,
        "k_proj": torch.bfloat16,
        "gate_proj": torch.bfloat16,
        "layernorm": torch.float16,
    }

    def change(weights: dict[str, Any]) -> None:
        for name, value in weights.items():
            weights[name] = value.to(next((d for part, d in dtypes.items() if part in name), value.dtype))

    stored = load_file(resave(path, change))
    for dtype in (np.float32, ml_dtypes.bfloat16):
        for parameter in load(path, [1, 1], 1, dtype=dtype).parameters:
            pieces = [stored[piece.tensor][slice(*piece.rows)] for piece in parameter.spec.pieces]
            columns = [piece.columns for piece in parameter.spec.pieces]
            cut = [p[:, slice(*c)] if c else p for p, c in zip(pieces, columns, strict=True)]
            wanted = torch.cat([piece.float() for piece in cut]).numpy()
            assert np.array_equal(parameter.value, wanted.astype(parameter.value.dtype))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_finds_what_is_not_finite_in_its_own_part(tiny: Models, tmp_path: Path, rank: int) -> None:
    """Its place is that in the whole tensor; the other rank never reads it."""
    path = tiny.copy("split-9-3", tmp_path)
    name, row, column = "model.layers.1.mlp.down_proj.weight", 33, 20 if rank == 0 else 590

    def change(weights: dict[str, Any]) -> None:
        weights[name][row, column] = float("nan")

    file = resave(path, change)
    load(path, [1, 1], 1 - rank)
    with pytest.raises(CheckpointError) as caught:
        load(path, [1, 1], rank)
    assert str(caught.value).startswith(f"{file}: tensor '{name}': element [{row}, {column}] is nan")


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
    quantized = load(tiny.directory("split-9-3"), [1, 1, 1], 1, quantization="int4").parameters
    for size in (1, 1000, 4096):
        monkeypatch.setattr("serried.weights.load.CHUNK_BYTES", size)
        got = load(tiny.directory("split-9-3"), [1, 1, 1], 1)
        assert all(np.array_equal(a.value, b.value) for a, b in zip(got.parameters, wanted, strict=True))
        assert len(got.progress) > len(wanted)
        again = load(tiny.directory("split-9-3"), [1, 1, 1], 1, quantization="int4").parameters
        assert all(np.array_equal(a.value, b.value) for a, b in zip(again, quantized, strict=True))


def methods(loaded: SimpleNamespace) -> dict[str, str | None]:
    """By the first tensor of each parameter of a layer or of the vocabulary, what it is kept in."""
    return {
        p.spec.pieces[0].tensor.removeprefix("model.layers.0."): p.method.name if p.method else None
        for p in loaded.parameters
        if p.kind != "vector" and "layers.1" not in p.spec.pieces[0].tensor
    }


def test_a_parameter_of_several_types(tiny: Models) -> None:
    """The widest of its tensors' methods; those that have another are converted."""
    path = tiny.gguf("gguf-llama", "MIXED")
    loaded = load(path)
    assert methods(loaded) == {
        "model.embed_tokens.weight": "int4_min",
        "self_attn.q_proj.weight": "int4_min",
        "self_attn.o_proj.weight": "int8",
        "mlp.gate_proj.weight": "int8",
        "mlp.down_proj.weight": None,
        "lm_head.weight": "int8",
    }
    plain = load(path, quantization="none")
    assert set(methods(plain).values()) == {None}
    for kept, exact in zip(loaded.parameters, plain.parameters, strict=True):
        row = 0
        for piece in kept.spec.pieces:
            part = slice(row, row + piece.rows.size)
            same = kept.method is None or loaded.checkpoint.tensors[piece.tensor].format in {"Q4_1", "Q8_0"}
            if same and not (kept.method is INT8 and "gate" in piece.tensor):
                assert np.array_equal(kept.value[part], exact.value[part])
            else:
                wanted = quantize_rows(kept.method, exact.value[part]).values()
                assert np.array_equal(kept.value[part], wanted)
            row += piece.rows.size


def test_a_parameter_with_a_plain_part_stays_plain(tiny: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXED, "attn_v", "F32")
    path = Models(tiny.root / "plain-part")
    path.root.mkdir()
    path._models = tiny._models
    assert methods(load(path.gguf("gguf-llama", "MIXED")))["self_attn.q_proj.weight"] is None


@pytest.mark.parametrize("quantization", ["int8", "int4", None])
def test_what_became_what(tiny: Models, quantization: str | None) -> None:
    loaded = load(tiny.gguf("gguf-llama", "Q4_0"), quantization=quantization)
    said = describe_methods(loaded.parameters, loaded.checkpoint, "bfloat16")
    assert (
        said
        == {
            "int8": "16 Q4_0 -> int8, 5 F32 -> float32",
            "int4": "14 Q4_0 -> int4, 5 F32 -> float32, 2 Q4_0 -> int8",
            None: "16 Q4_0 -> int4, 5 F32 -> float32",
        }[quantization]
    )
    plain = load(tiny.gguf("gguf-llama", "Q4_0"), quantization="none")
    assert describe_methods(plain.parameters, plain.checkpoint, "bfloat16") == "16 Q4_0 -> bfloat16, 5 F32 -> float32"
    assert describe_methods(plain.parameters, plain.checkpoint, None) == "16 Q4_0, 5 F32"
    never = load(tiny.directory("llama-tied"))
    assert describe_methods(never.parameters, never.checkpoint, "bfloat16") is None


@pytest.mark.parametrize("weights", [[1], [1, 1, 1], [3, 1]])
def test_shards_of_quantized_tensors(tiny: Models, weights: list[int]) -> None:
    """Each rank quantizes its own part: the very numbers of the whole tensor quantized at once."""
    whole = {key: value.float().numpy() for key, value in tiny.model("split-9-3").state_dict().items()}
    quantized = {key: quantize_rows(INT8, value).values() for key, value in whole.items() if value.ndim == 2}
    for rank in range(len(weights)):
        for parameter in load(tiny.directory("split-9-3"), weights, rank, quantization="int8").parameters:
            row = 0
            for piece in parameter.spec.pieces:
                values = quantized.get(piece.tensor, whole[piece.tensor])
                wanted = (
                    values[slice(*piece.rows)]
                    if values.ndim == 1
                    else values[slice(*piece.rows), slice(*(piece.columns or (0, None)))]
                )
                assert np.array_equal(parameter.value[row : row + piece.rows.size], wanted)
                row += piece.rows.size


def test_nominal_bytes(tiny: Models) -> None:
    """What the formats take: 8.5 and 5 bits with the scales, two or four bytes, four for a vector."""
    by_kind = {}
    for quantization in ("none", "int8", "int4"):
        loaded = load(tiny.directory("split-9-3"), quantization=quantization)
        for parameter in loaded.parameters:
            for dtype in ("bfloat16", "float32"):
                by_kind[quantization, parameter.kind, dtype] = parameter.nominal_bytes(dtype) / parameter.elements
    assert {key[:2]: value for key, value in by_kind.items() if key[2] == "bfloat16"} == {
        ("none", "vector"): 4, ("none", "linear"): 2, ("none", "embedding"): 2,
        ("int8", "vector"): 4, ("int8", "linear"): 8.5 / 8, ("int8", "embedding"): 8.5 / 8,
        ("int4", "vector"): 4, ("int4", "linear"): 5 / 8, ("int4", "embedding"): 8.5 / 8,
    }  # fmt: skip
    assert by_kind["none", "linear", "float32"] == 4
    assert by_kind["int4", "linear", "float32"] == 5 / 8


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
