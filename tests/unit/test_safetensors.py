"""The safetensors reader and writer against the safetensors library, and against damage."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serried.errors import CheckpointError
from serried.parallel.reduction import Span
from serried.weights import files
from serried.weights.checkpoint import Array
from serried.weights.safetensors import SafetensorsCheckpoint
from serried.weights.safetensors_writer import TensorSource, write_safetensors

SHAPES = {
    "a.weight": (7, 12),
    "b.weight": (5,),
    "c.experts": (3, 4, 6),
    "d.empty": (0, 8),
    "e.narrow": (9, 1),
}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def bits(array: Array) -> Any:
    return array.view(f"u{array.dtype.itemsize}")


def numpy_of(tensor: torch.Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


@pytest.fixture(scope="module", params=DTYPES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A file that the library wrote, and what is in it."""
    generator = torch.Generator().manual_seed(1)
    tensors = {n: torch.randn(s, generator=generator).to(DTYPES[request.param]) for n, s in SHAPES.items()}
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    safetensors.torch.save_file(tensors, path)
    return path, {name: numpy_of(t) for name, t in tensors.items()}


def test_every_tensor_equals_the_librarys(saved: tuple[Path, Any]) -> None:
    path, tensors = saved
    for given_path in (path, path.parent, str(path)):
        checkpoint = SafetensorsCheckpoint(given_path)
        assert {name: info.shape for name, info in checkpoint.tensors.items()} == SHAPES
        for name, expected in tensors.items():
            values = checkpoint.read(name, Span(0, expected.shape[0]))
            assert values.dtype == expected.dtype and values.shape == expected.shape
            assert (bits(values) == bits(expected)).all()
            assert checkpoint.tensors[name].file == str(path)
        checkpoint.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_slice_equals_the_librarys_and_no_more_is_read(saved: tuple[Path, Any], data: Any) -> None:
    path, tensors = saved
    name = data.draw(st.sampled_from(sorted(tensors)))
    expected = tensors[name]
    edges = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in expected.shape[:2]]
    rows, columns = Span(*edges[0]), None
    if expected.ndim == 2 and data.draw(st.booleans()):
        columns = Span(*edges[1])
    checkpoint = SafetensorsCheckpoint(path)
    values = checkpoint.read(name, rows, columns)
    expected = expected[slice(*rows)] if columns is None else expected[slice(*rows), slice(*columns)]
    assert values.shape == expected.shape and (bits(values) == bits(expected)).all()
    assert checkpoint.bytes_read == expected.nbytes
    checkpoint.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """The (offset, bytes) of every read from now on."""
    seen: list[tuple[int, int]] = []
    preadv = os.preadv

    def spy(fd: int, buffers: list[memoryview], offset: int) -> int:
        seen.append((offset, sum(len(b) for b in buffers)))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", spy)
    yield seen


def test_rows_are_one_read_and_columns_one_a_row(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"w": np.arange(64 * 32, dtype=np.float32).reshape(64, 32)}, path)
    checkpoint = SafetensorsCheckpoint(path)
    data = path.stat().st_size - 64 * 32 * 4
    reads.clear()
    checkpoint.read("w", Span(3, 10))
    assert reads == [(data + 3 * 128, 7 * 128)]
    reads.clear()
    checkpoint.read("w", Span(2, 5), Span(8, 16))
    assert reads == [(data + row * 128 + 32, 32) for row in (2, 3, 4)]


def test_large_reads_come_in_pieces_with_no_second_copy(
    tmp_path: Path, reads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "READ_PIECE", 1 << 20)
    values = np.random.default_rng(0).standard_normal((1024, 1100), np.float32)
    safetensors.numpy.save_file({"w": values}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    reads.clear()
    tracemalloc.start()
    read = checkpoint.read("w", Span(0, 1024))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (read == values).all() and peak < values.nbytes + 100_000
    assert len(reads) == 5 and max(n for _, n in reads) == 1 << 20


def test_other_dtypes_are_listed_and_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"w": torch.zeros(4, 4).to(torch.float8_e4m3fn), "ids": torch.zeros(3, dtype=torch.int64)}
    safetensors.torch.save_file(tensors, path)
    checkpoint = SafetensorsCheckpoint(path)
    assert checkpoint.tensors["w"].format == "F8_E4M3"
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'w': dtype F8_E4M3 .* F32, F16, BF16"):
        checkpoint.read("w", Span(0, 4))
    with pytest.raises(CheckpointError, match="tensor 'ids': dtype I64"):
        checkpoint.read("ids", Span(0, 3))


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        ("w", Span(0, 5), None),
        ("w", Span(-1, 2), None),
        ("w", Span(3, 2), None),
        ("w", Span(0, 4), Span(0, 4)),
        ("v", Span(0, 2), Span(0, 1)),
        ("cube", Span(0, 2), Span(0, 1)),
        ("scalar", Span(0, 1), None),
        ("absent", Span(0, 1), None),
    ],
)
def test_slices_that_do_not_exist(tmp_path: Path, name: str, rows: Span, columns: Span | None) -> None:
    shapes = {"w": (4, 3), "v": (4,), "cube": (2, 2, 2), "scalar": ()}
    safetensors.numpy.save_file({n: np.zeros(s, np.float32) for n, s in shapes.items()}, tmp_path / "x.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=rf"x\.safetensors: tensor '{name}'"):
        checkpoint.read(name, rows, columns)


def entry(begin: Any = 0, end: Any = 16, shape: Any = (2, 2), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def write_raw(path: Path, header: Any, data: bytes = bytes(16), length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


HUGE = 2**63 - 1
W = r"tensor 'w': "
DAMAGED = {
    "truncated data": ({"w": entry()}, bytes(15), None, W + "truncated"),
    "bytes left over": ({"w": entry()}, bytes(17), None, "1 bytes of data belong to no tensor"),
    "a hole": ({"w": entry(), "v": entry(20, 36)}, bytes(36), None, "4 bytes of data belong to no tensor"),
    "header past the end": ({"w": entry()}, b"", 10_000, "header of 10000 bytes"),
    "absurd header": ({"w": entry()}, b"", HUGE, f"header of {HUGE} bytes"),
    "bad JSON": (b'{"w": ', b"", None, "not valid JSON"),
    "bad UTF-8": (b'{"\xff": 1}', b"", None, "not valid JSON"),
    "deep JSON": (b"[" * 200_000, b"", None, "not valid JSON"),
    "no object": ([1], b"", None, "not a JSON object"),
    "twice": (b'{"w": 1, "w": 2}', b"", None, "'w' appears twice"),
    "no dtype": ({"w": {"shape": [4], "data_offsets": [0, 16]}}, bytes(16), None, W + "its header lacks"),
    "entry is a list": ({"w": []}, bytes(16), None, W + "its header lacks"),
    "dtype is a number": ({"w": entry(dtype=1)}, bytes(16), None, W + "its header lacks"),
    "end before begin": ({"w": entry(16, 0)}, bytes(16), None, W + "impossible data_offsets"),
    "negative begin": ({"w": entry(-16, 0)}, bytes(16), None, W + "impossible data_offsets"),
    "offset is a string": ({"w": entry("0")}, bytes(16), None, W + "impossible data_offsets"),
    "offset out of range": ({"w": entry(0, HUGE)}, bytes(16), None, W + "truncated"),
    "overlap": ({"v": entry(0, 16), "w": entry(8, 24)}, bytes(24), None, W + "its data overlaps .* 'v'"),
    "too small": (
        {"w": entry(shape=(3, 2))},
        bytes(16),
        None,
        W + r"16 bytes of data do not make F32 \[3, 2\]",
    ),
    "huge count": ({"w": entry(shape=(HUGE, 2))}, bytes(16), None, W + "impossible shape"),
    "huge and empty": ({"w": entry(0, 0, shape=(2**40, 2**40, 0))}, b"", None, W + "impossible shape"),
    "wraps to 16": ({"w": entry(shape=(2**62 + 1, 4))}, bytes(16), None, W + "impossible shape"),
    "negative size": ({"w": entry(shape=(-2, -2))}, bytes(16), None, W + "impossible shape"),
    "bool size": ({"w": entry(shape=(True, 4))}, bytes(16), None, W + "impossible shape"),
    "many dimensions": ({"w": entry(shape=[1] * 80)}, bytes(4), None, W + "impossible shape"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path, case: str) -> None:
    header, data, length, message = DAMAGED[case]
    path = write_raw(tmp_path / "bad.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors: .*" + message):
        SafetensorsCheckpoint(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.integers(0, 180),
    patch=st.binary(min_size=1, max_size=8) | st.sampled_from([b"9" * 8, b'"w"', b"[]"]),
)
def test_no_damage_gets_past_the_checks(tmp_path: Path, at: int, patch: bytes) -> None:
    """Whatever is overwritten, the file opens and can be read, or is refused as it should be."""
    path = write_raw(tmp_path / "bad.safetensors", {"v": entry(), "w": entry(16, 40, (3, 2))}, bytes(40))
    raw = bytearray(path.read_bytes())
    raw[at : at + len(patch)] = patch
    path.write_bytes(raw)
    try:
        checkpoint = SafetensorsCheckpoint(path)
        for name, info in checkpoint.tensors.items():
            checkpoint.read(name, Span(0, info.shape[0]))
        checkpoint.close()
    except CheckpointError as error:
        assert "bad.safetensors: " in str(error)


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_with_no_header_at_all(tmp_path: Path, size: int) -> None:
    (tmp_path / "bad.safetensors").write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match=r"bad\.safetensors: truncated"):
        SafetensorsCheckpoint(tmp_path / "bad.safetensors")


def test_a_file_cut_short_after_it_was_opened(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "model.safetensors", {"w": entry()})
    checkpoint = SafetensorsCheckpoint(path)
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'w': truncated"):
        checkpoint.read("w", Span(0, 2))


def write_shards(directory: Path, shards: dict[str, list[str]], weight_map: Any) -> None:
    for file, names in shards.items():
        tensors = {n: np.full((2, 2), ord(n[0]), np.float32) for n in names}
        safetensors.numpy.save_file(tensors, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    write_shards(tmp_path, {"1.safetensors": ["a", "b"], "2.safetensors": ["c"]},
                 {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"})  # fmt: skip
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert sorted(checkpoint.tensors) == ["a", "b", "c"]
    assert checkpoint.tensors["c"].file == str(tmp_path / "2.safetensors")
    assert checkpoint.read("c", Span(0, 1)).tolist() == [[99, 99]]
    checkpoint.read("a", Span(0, 2))
    assert checkpoint.bytes_read == 24
    checkpoint.close()


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (
            {"a": "1.safetensors", "c": "3.safetensors"},
            r"index\.json: tensor 'c': its file .*3\.safetensors does not",
        ),
        ({"a": "1.safetensors", "z": "2.safetensors"}, r"2\.safetensors: tensor 'z': not in this file"),
        ({"a": "2.safetensors", "c": "2.safetensors"}, r"2\.safetensors: tensor 'a': not in this file"),
        (
            {"a": "../1.safetensors"},
            r"index\.json: tensor 'a': '../1\.safetensors' is not the name of a file",
        ),
        ({"a": 1}, r"index\.json: tensor 'a': 1 is not the name of a file"),
        ([], r"index\.json: has no weight_map"),
    ],
)
def test_an_index_that_does_not_hold(tmp_path: Path, weight_map: Any, message: str) -> None:
    write_shards(tmp_path, {"1.safetensors": ["a"], "2.safetensors": ["c"]}, weight_map)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsCheckpoint(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, {"1.safetensors": ["a"], "2.safetensors": ["a", "c"]},
                 {"a": "1.safetensors", "c": "2.safetensors"})  # fmt: skip
    with pytest.raises(CheckpointError, match=r"2\.safetensors: tensor 'a': is in .*1\.safetensors too"):
        SafetensorsCheckpoint(tmp_path)


def test_an_index_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json: cannot be read"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_read(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_bytes(b"\x80\x04.")
    for path in (tmp_path, tmp_path / file):
        with pytest.raises(CheckpointError, match=r"pickles .* are never read.*convert to safetensors"):
            SafetensorsCheckpoint(path)


def test_directories_and_paths_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights here"):
        SafetensorsCheckpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"absent\.safetensors: no such file"):
        SafetensorsCheckpoint(tmp_path / "absent.safetensors")
    write_raw(tmp_path / "other.safetensors", {"w": entry()})
    with pytest.raises(CheckpointError, match=r"other\.safetensors: give a file itself"):
        SafetensorsCheckpoint(tmp_path)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_files_are_closed_also_after_an_error(tmp_path: Path) -> None:
    write_shards(tmp_path, {"1.safetensors": ["a"]}, {"a": "1.safetensors", "b": "1.safetensors"})
    before = open_files()
    with pytest.raises(CheckpointError):
        SafetensorsCheckpoint(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path / "1.safetensors")
    checkpoint.close()
    checkpoint.close()
    assert open_files() == before


def source(name: str, array: Array, pieces: int = 3) -> TensorSource:
    dtype = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[str(array.dtype)]
    return TensorSource(name, dtype, array.shape, lambda: np.array_split(array, pieces))


def test_what_is_written_loads_with_the_library(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Array] = {
        "odd": rng.standard_normal(5).astype(ml_dtypes.bfloat16),
        "wide": rng.standard_normal((6, 4)).astype(np.float32),
        "half": rng.standard_normal((2, 3, 2)).astype(np.float16),
        "turned": rng.standard_normal((4, 6)).astype(np.float32).T,
    }
    path = tmp_path / "model.safetensors"
    write_safetensors(path, (source(n, a) for n, a in arrays.items()), made_by="serried")
    loaded = safetensors.torch.load_file(path)
    own = SafetensorsCheckpoint(path)
    for name, array in arrays.items():
        assert (bits(numpy_of(loaded[name])) == bits(np.ascontiguousarray(array))).all()
        assert (own.read(name, Span(0, array.shape[0])) == array).all()
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "made_by": "serried"}
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_writer_holds_one_chunk_at_a_time(tmp_path: Path) -> None:
    chunk = 1 << 18
    sources = [
        TensorSource(n, "F32", (32, chunk), lambda: (np.full(chunk, i, np.float32) for i in range(32))) for n in "ab"
    ]
    tracemalloc.start()
    write_safetensors(tmp_path / "model.safetensors", sources)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 4 * chunk
    assert SafetensorsCheckpoint(tmp_path).read("b", Span(31, 32), Span(0, 1)) == 31


@pytest.mark.parametrize(
    ("shape", "chunks", "message"),
    [
        ((4,), [np.zeros(3, np.float32)], "tensor 'w': 1 elements are missing"),
        ((4,), [np.zeros(5, np.float32)], "tensor 'w': a chunk float32"),
        ((4,), [np.zeros(4)], "tensor 'w': a chunk float64"),
    ],
)
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, shape: Any, chunks: Any, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match=message):
        write_safetensors(path, [TensorSource("w", "F32", shape, lambda: chunks)])
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_a_name_written_twice_is_refused(tmp_path: Path) -> None:
    twice = [source("w", np.zeros(2, np.float32))] * 2
    with pytest.raises(ValueError, match="'w' is given twice"):
        write_safetensors(tmp_path / "model.safetensors", twice)
