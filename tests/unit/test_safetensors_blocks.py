"""What `serried quantize` writes: read back by the slice, block for block, and refused where it is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from serried.errors import CheckpointError
from serried.parallel.reduction import Span
from serried.quant.method import GROUP, Method
from serried.quant.registry import METHODS
from serried.quant.rows import quantize_rows
from serried.weights.safetensors import SafetensorsCheckpoint
from serried.weights.safetensors_blocks import DECLARATION, declare, part_shape, split_blocks
from serried.weights.safetensors_writer import Entry, SafetensorsWriter

ROWS, COLUMNS = 13, 173
VALUES = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
NORM = np.arange(7, dtype=np.float32)
BLOCKS = {name: quantize_rows(method, VALUES) for name, method in METHODS.items()}
Change = Callable[[dict[str, Any], dict[str, str]], None]


def write(path: Path, change: Change = lambda tensors, metadata: None) -> Path:
    """A matrix in every method, by the name of the method, and a plain vector."""
    tensors: dict[str, Any] = {"norm": ("F32", NORM)}
    for name, rows in BLOCKS.items():
        parts = split_blocks(rows.method, rows.blocks)
        tensors |= {f"{name}.weight{part.suffix}": (part.dtype, array) for part, array in parts}
    metadata = declare({f"{name}.weight": (rows.method, COLUMNS) for name, rows in BLOCKS.items()})
    change(tensors, metadata)
    file = path / "model.safetensors"
    entries = [Entry(name, dtype, array.shape) for name, (dtype, array) in tensors.items()]
    with SafetensorsWriter(file, entries, **metadata) as writer:
        for name, (_, array) in tensors.items():
            writer.append(name, array)
    return file


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("blocks"))


def test_it_is_a_safetensors_file(file: Path) -> None:
    """The library reads it: int8 and nibbles, with float16 scales and minima beside them."""
    with safe_open(str(file), "np") as opened:
        found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
    assert {name: (str(array.dtype), array.shape) for name, array in found.items()} == {
        "norm": ("float32", (7,)),
        "int8.weight": ("int8", (ROWS, 192)),
        "int8.weight_scale": ("float16", (ROWS, 6)),
        "int4.weight": ("uint8", (ROWS, 96)),
        "int4.weight_scale": ("float16", (ROWS, 6)),
        "int4_min.weight": ("uint8", (ROWS, 96)),
        "int4_min.weight_scale": ("float16", (ROWS, 6)),
        "int4_min.weight_min": ("float16", (ROWS, 6)),
    }
    scales = np.repeat(found["int8.weight_scale"].astype(np.float32), GROUP, axis=1)
    assert np.array_equal((found["int8.weight"] * scales)[:, :COLUMNS], BLOCKS["int8"].values())


def test_what_it_lists(file: Path) -> None:
    checkpoint = SafetensorsCheckpoint(file)
    assert sorted(checkpoint.tensors) == ["int4.weight", "int4_min.weight", "int8.weight", "norm"]
    for name, method in METHODS.items():
        assert checkpoint.tensors[f"{name}.weight"] == ((ROWS, COLUMNS), name, str(file), method)
    assert np.array_equal(checkpoint.read("norm", Span(1, 5)), NORM[1:5])


@settings(max_examples=60, deadline=None)
@given(method=st.sampled_from(list(METHODS.values())), data=st.data())
def test_any_slice(file: Path, method: Method, data: Any) -> None:
    rows = Span(*sorted(data.draw(st.tuples(*[st.integers(0, ROWS)] * 2))))
    columns = data.draw(st.none() | st.tuples(*[st.integers(0, COLUMNS)] * 2).map(lambda pair: Span(*sorted(pair))))
    checkpoint = SafetensorsCheckpoint(file)
    whole, name = BLOCKS[method.name], f"{method.name}.weight"
    first, last = columns or (0, COLUMNS)
    assert np.array_equal(checkpoint.read(name, rows, columns), whole.values()[slice(*rows), first:last])
    groups = -(-last // GROUP) - first // GROUP
    assert checkpoint.bytes_read == rows.size * groups * method.block_bytes
    found = checkpoint.read_blocks(name, rows, columns, method)
    if first % GROUP:
        assert found is None
    else:
        assert found is not None and found.shape == (rows.size, last - first)
        wanted = slice(method.row_bytes(first), method.row_bytes(last))
        assert np.array_equal(found.blocks, whole.blocks[slice(*rows), wanted])
    others = [other for other in METHODS.values() if other is not method]
    assert all(checkpoint.read_blocks(name, rows, None, other) is None for other in others)
    checkpoint.close()


def drop(name: str) -> Change:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        del tensors[name]

    return change


def replace(name: str, array: Any, dtype: str) -> Change:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors[name] = (dtype, array)

    return change


def say(text: str) -> Change:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        metadata[DECLARATION] = text

    return change


def resay(name: str, value: Any) -> Change:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        metadata[DECLARATION] = json.dumps(json.loads(metadata[DECLARATION]) | {name: value})

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop("int8.weight_scale"), "tensor 'int8.weight_scale': is missing, but int8.weight is declared to be int8"),
        (drop("int4_min.weight_min"), "tensor 'int4_min.weight_min': is missing"),
        (drop("int4.weight"), "tensor 'int4.weight': is missing"),
        (replace("int8.weight_scale", np.ones((ROWS, 6), np.float32), "F32"), "is F32 [13, 6]; int8 of 173 columns"),
        (replace("int8.weight_scale", np.ones((ROWS, 5), np.float16), "F16"), "takes F16 [13, 6]"),
        (replace("int8.weight_scale", np.ones((ROWS - 1, 6), np.float16), "F16"), "different numbers of rows"),
        (replace("int8.weight", np.ones((ROWS, 173), np.int8), "I8"), "takes I8 [13, 192]"),
        (resay("int8.weight", ["int8", 500]), "int8 of 500 columns takes"),
        (resay("int8.weight", ["int8", -3]), "tensor 'int8.weight': is declared to have -3 columns"),
        (resay("int8.weight", ["int8", 1e300]), "is declared to have 1e+300 columns"),
        (resay("int8.weight", ["int4", COLUMNS]), "is I8 [13, 192]; int4 of 173 columns takes U8 [13, 96]"),
        (resay("int8.weight", ["int2", COLUMNS]), f"its metadata {DECLARATION} cannot be read: KeyError('int2')"),
        (resay("int8.weight", "int8"), f"its metadata {DECLARATION} cannot be read"),
        (resay("norm", ["int8", 7]), "tensor 'norm_scale': is missing"),
        (say("[1, 2]"), f"its metadata {DECLARATION} cannot be read"),
        (say("{"), f"its metadata {DECLARATION} cannot be read"),
        (say("[" * 100_000), f"its metadata {DECLARATION} cannot be read"),
    ],
)
def test_damage(tmp_path: Path, change: Change, said: str) -> None:
    file = write(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsCheckpoint(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert said in str(caught.value)


def test_the_writer_wants_every_element(tmp_path: Path) -> None:
    """In any order, no more and no fewer; else there is no file."""
    path = tmp_path / "m.safetensors"
    entries = [Entry("a", "I8", (2, 3)), Entry("b", "F16", (4,))]
    with SafetensorsWriter(path, entries) as writer:
        writer.append("b", np.ones(1, np.float16))
        writer.append("a", np.ones((2, 3), np.int8))
        writer.append("b", np.zeros(3, np.float16))
    with safe_open(str(path), "np") as opened:
        assert opened.get_tensor("b").tolist() == [1, 0, 0, 0]
    path.unlink()
    for chunks, said in (([3], "1 elements are missing"), ([3, 2], "does not fit")):
        with pytest.raises(ValueError, match=said), SafetensorsWriter(path, entries[1:]) as writer:
            for count in chunks:
                writer.append("b", np.ones(count, np.float16))
    assert not list(tmp_path.iterdir())


def test_the_shapes_of_the_parts() -> None:
    for method in METHODS.values():
        sizes = {part.suffix: part_shape(part, 5, 64) for part in method.parts}
        assert sizes["_scale"] == (5, 2)
        assert sizes[""] == (5, 64 if method.name == "int8" else 32)
