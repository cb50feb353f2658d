"""Damaged checkpoints, each damage in each container: refused in time, with file and tensor, and never read wrongly.

A damage is a function of a copy of a checkpoint that changes it and says what the error must name: the file, and the
tensor where one is concerned.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_load import load
from tiny_models import Models

from serried.cli.main import main
from serried.errors import CheckpointError

HUGE = 2**63 - 1
SECONDS = 2.0  # of processor time, which does not depend on what else the machine does
INDEX = "model.safetensors.index.json"


class Blame(NamedTuple):
    """What the error must name, and words that it must hold."""

    file: Path
    tensor: str = ""
    words: str = ""


Damage = Callable[[Path], Blame]


def assert_refused(path: Path, blame: Blame, weights: tuple[int, ...] = (1,), rank: int = 0) -> None:
    start = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        load(path, weights, rank)
    assert time.process_time() - start < SECONDS
    for word in (str(blame.file), blame.tensor, blame.words):
        assert word in str(caught.value)


# safetensors: one file, or shards and their index


class Stored:
    """A safetensors file taken to pieces: header and data, to be changed and written back."""

    def __init__(self, path: Path) -> None:
        raw = path.read_bytes()
        self.length = int.from_bytes(raw[:8], "little")
        self.header: dict[str, Any] = json.loads(raw[8 : 8 + self.length])
        self.data = bytearray(raw[8 + self.length :])
        self.path = path

    def write(self, length: int | None = None) -> None:
        raw = json.dumps(self.header).encode()
        prefix = (len(raw) if length is None else length).to_bytes(8, "little")
        self.path.write_bytes(prefix + raw + self.data)

    def append(self, name: str, values: Any, dtype: str = "F32") -> None:
        begin = len(self.data)
        self.data += values.tobytes()
        self.header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [begin, len(self.data)]}

    def values(self, name: str) -> Any:
        """A view of a tensor's data, in float32."""
        entry = self.header[name]
        begin, end = entry["data_offsets"]
        return np.frombuffer(self.data, np.uint8)[begin:end].view(np.float32).reshape(entry["shape"])


NORM, DOWN, HEAD = "model.norm.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"


def shard_of(path: Path, tensor: str) -> Path:
    """The file of a checkpoint that holds a tensor."""
    if not (path / INDEX).exists():
        return path / "model.safetensors"
    return path / str(json.loads((path / INDEX).read_text())["weight_map"][tensor])


def in_header(tensor: str, change: Callable[[dict[str, Any]], None], words: str) -> Damage:
    def damage(path: Path) -> Blame:
        stored = Stored(shard_of(path, tensor))
        change(stored.header[tensor])
        stored.write()
        return Blame(stored.path, tensor, words)

    return damage


def sized(change: Callable[[bytes], bytes], words: str) -> Damage:
    """A file whose bytes are changed as a whole."""

    def damage(path: Path) -> Blame:
        file = shard_of(path, DOWN)
        file.write_bytes(change(file.read_bytes()))
        return Blame(file, "", words)

    return damage


def header_length(length: int) -> Damage:
    def damage(path: Path) -> Blame:
        stored = Stored(shard_of(path, DOWN))
        stored.write(length if length > 8 else stored.length + length)
        return Blame(stored.path, "", "header")

    return damage


def removed(path: Path) -> Blame:
    stored = Stored(shard_of(path, DOWN))
    begin, end = stored.header.pop(DOWN)["data_offsets"]
    for entry in stored.header.values():
        if "data_offsets" in entry and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [at - (end - begin) for at in entry["data_offsets"]]
    del stored.data[begin:end]
    stored.write()
    return Blame(stored.path, DOWN)


def left_over(path: Path) -> Blame:
    stored = Stored(shard_of(path, DOWN))
    stored.append("model.layers.2.mlp.down_proj.weight", np.ones((64, 173), np.float32))
    stored.write()
    return Blame(stored.path, "model.layers.2.mlp.down_proj.weight")


def renamed(path: Path) -> Blame:
    stored = Stored(shard_of(path, DOWN))
    stored.header["model.layers.1.mlp.down.weight"] = stored.header.pop(DOWN)
    stored.write()
    return Blame(stored.path, DOWN)


def overlapping(path: Path) -> Blame:
    stored = Stored(shard_of(path, DOWN))
    stored.append("spare", np.ones((64, 173), np.float32))
    begin, end = stored.header[DOWN]["data_offsets"]
    stored.header["spare"]["data_offsets"] = [begin + 4, end + 4]
    stored.write()
    return Blame(stored.path, "", "overlaps")


def not_finite(tensor: str, place: tuple[int, ...], value: float) -> Damage:
    def damage(path: Path) -> Blame:
        stored = Stored(shard_of(path, tensor))
        stored.values(tensor)[place] = value
        stored.write()
        return Blame(stored.path, tensor, f"element {list(place)} is {value}")

    return damage


def set_to(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda entry: entry.update({key: value})


SAFETENSORS: dict[str, Damage] = {
    "cut by a byte": sized(lambda raw: raw[:-1], "truncated"),
    "cut in half": sized(lambda raw: raw[: len(raw) // 2], "truncated"),
    "cut in the header": sized(lambda raw: raw[:100], "header"),
    "cut in the length": sized(lambda raw: raw[:5], "truncated"),
    "empty": sized(lambda raw: b"", "truncated"),
    "a byte more": sized(lambda raw: raw + b"\0", "1 bytes of data belong to no tensor"),
    "zeros": sized(lambda raw: bytes(len(raw)), "header"),
    "header too long": header_length(8),
    "header too short": header_length(-8),
    "header of 2^63": header_length(HUGE),
    "header of 99 MB": header_length(99_000_000),
    "past the end": in_header(DOWN, set_to("data_offsets", [0, 1 << 40]), "truncated"),
    "offset of 2^63": in_header(DOWN, set_to("data_offsets", [HUGE - 4 * 64 * 173, HUGE]), "truncated"),
    "offset below 0": in_header(DOWN, set_to("data_offsets", [-8, 8]), "impossible"),
    "shape of 2^63": in_header(DOWN, set_to("shape", [HUGE, 173]), "impossible"),
    "shape that wraps": in_header(DOWN, set_to("shape", [2**62 + 64, 4 * 173]), "impossible"),
    "transposed": in_header(DOWN, set_to("shape", [173, 64]), "shape [173, 64]"),
    "one vector": in_header(DOWN, set_to("shape", [64 * 173]), "shape [11072]"),
    "smaller": in_header(DOWN, set_to("shape", [64, 172]), "bytes of data do not make"),
    "I32": in_header(DOWN, set_to("dtype", "I32"), "dtype I32 cannot be read"),
    "F16": in_header(DOWN, set_to("dtype", "F16"), "bytes of data do not make F16"),
    "unknown dtype": in_header(DOWN, set_to("dtype", "F12"), "dtype F12 cannot be read"),
    "missing": removed,
    "left over": left_over,
    "renamed": renamed,
    "overlap": overlapping,
    "NaN in a norm": not_finite(NORM, (63,), np.nan),
    "NaN in a linear": not_finite(DOWN, (40, 170), np.nan),
    "infinity": not_finite("model.layers.0.self_attn.k_proj.weight", (31, 0), np.inf),
    "minus infinity": not_finite("model.embed_tokens.weight", (0, 1), -np.inf),
    "NaN in the head": not_finite(HEAD, (300, 63), np.nan),
}


@pytest.fixture(scope="module")
def originals(tiny: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in every container."""
    shards = tmp_path_factory.mktemp("damaged") / "shards"
    tiny.model("llama-untied").save_pretrained(shards, max_shard_size="60KB")
    return {
        "file": tiny.directory("llama-untied"),
        "shards": shards,
        "gguf": tiny.gguf("gguf-llama"),
        "split": tiny.split_gguf("gguf-llama"),
    }


def copied(original: Path, to: Path) -> Path:
    """A copy that may be damaged: of a directory, of a file, or of all files of a split model."""
    if original.is_dir():
        return Path(shutil.copytree(original, to / original.name))
    pattern = original.name.replace("-00001-", "-*-")
    for file in original.parent.glob(pattern):
        shutil.copy(file, to)
    return to / original.name


@pytest.mark.parametrize("container", ["file", "shards"])
@pytest.mark.parametrize("damage", SAFETENSORS)
def test_safetensors(originals: dict[str, Path], tmp_path: Path, container: str, damage: str) -> None:
    path = copied(originals[container], tmp_path)
    assert_refused(path, SAFETENSORS[damage](path))


# The index of shards


def index(change: Callable[[dict[str, str]], Any], tensor: str, words: str, file: str = INDEX) -> Damage:
    def damage(path: Path) -> Blame:
        document = json.loads((path / INDEX).read_text())
        change(document["weight_map"])
        (path / INDEX).write_text(json.dumps(document))
        return Blame(path / file, tensor, words)

    return damage


def shard_removed(path: Path) -> Blame:
    shard_of(path, DOWN).unlink()
    return Blame(path / INDEX, "", f"{shard_of(path, DOWN)} does not exist")


def shard_a_directory(path: Path) -> Blame:
    shard = shard_of(path, DOWN)
    shard.unlink()
    shard.mkdir()
    return Blame(path / INDEX, "", f"{shard} does not exist")


def shards_exchanged(path: Path) -> Blame:
    """Two shards under each other's names."""
    one, other = shard_of(path, DOWN), shard_of(path, HEAD)
    one.rename(path / "spare")
    other.rename(one)
    (path / "spare").rename(other)
    return Blame(other, HEAD, "not in this file")


def in_two_shards(path: Path) -> Blame:
    stored = Stored(shard_of(path, HEAD))
    stored.append(DOWN, np.ones((64, 173), np.float32))
    stored.write()
    return Blame(stored.path if stored.path > shard_of(path, DOWN) else shard_of(path, DOWN), DOWN, " too")


def not_in_the_index(path: Path) -> Blame:
    blame = index(lambda names: names.pop(NORM), NORM, "does not name it")(path)
    return blame._replace(file=path)


INDICES: dict[str, Damage] = {
    "an absent file": index(lambda names: names.update({DOWN: "model-9.safetensors"}), DOWN, "does not exist"),
    "a path": index(lambda names: names.update({DOWN: "../model.safetensors"}), DOWN, "is not the name of a file"),
    "a number": index(lambda names: names.update({DOWN: 3}), DOWN, "is not the name of a file"),
    "another shard": index(lambda names: names.update({DOWN: names[HEAD]}), DOWN, "not in this file", ""),
    "a tensor that is nowhere": index(lambda names: names.update({"spare": names[HEAD]}), "spare", "not in", ""),
    "a tensor forgotten": not_in_the_index,
    "nothing": index(lambda names: names.clear(), "", "has no weight_map"),
    "a shard is removed": shard_removed,
    "a shard is a directory": shard_a_directory,
    "shards exchanged": shards_exchanged,
    "a tensor in two shards": in_two_shards,
}


@pytest.mark.parametrize("damage", INDICES)
def test_indices(originals: dict[str, Path], tmp_path: Path, damage: str) -> None:
    path = copied(originals["shards"], tmp_path)
    assert_refused(path, INDICES[damage](path))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 1}', "\x00" * 50])
def test_an_index_that_is_none(originals: dict[str, Path], tmp_path: Path, text: str) -> None:
    path = copied(originals["shards"], tmp_path)
    (path / INDEX).write_text(text)
    assert_refused(path, Blame(path / INDEX))


# GGUF: one file, or the files of a split model

G_NORM, G_DOWN = "output_norm.weight", "blk.1.ffn_down.weight"


@contextmanager
def opened(path: Path, tensor: str = G_DOWN) -> Iterator[gguf.GGUFReader]:
    """The file of a model that holds a tensor, whose fields can be changed in place."""
    for file in sorted(path.parent.glob(path.name.replace("-00001-", "-*-"))):
        reader = gguf.GGUFReader(file, "r+")
        if any(each.name == tensor for each in reader.tensors):
            reader.path = file
            yield reader
            reader.data.flush()
            return
    raise AssertionError(tensor)


def info_of(reader: gguf.GGUFReader, tensor: str) -> Any:
    return next(each for each in reader.tensors if each.name == tensor)


# The parts of a tensor's info, as the library splits it.
NAME_LENGTH, NAME, _, SHAPE, KIND, OFFSET = range(6)


def in_info(part: int, value: Any, words: str, tensor: str = "", at: int = 0) -> Damage:
    """A field of a tensor's info (sizes are innermost first) overwritten."""

    def damage(path: Path) -> Blame:
        with opened(path) as reader:
            info_of(reader, G_DOWN).field.parts[part][at] = value
        return Blame(reader.path, tensor, words)

    return damage


def in_field(key: str, value: int, words: str) -> Damage:
    def damage(path: Path) -> Blame:
        with opened(path) as reader:
            reader.fields[key].parts[-1][0] = value
        return Blame(reader.path, "", words)

    return damage


def in_metadata(key: str, value: int, tensor: str, words: str) -> Damage:
    """A field of the metadata, which is in the first file."""

    def damage(path: Path) -> Blame:
        reader = gguf.GGUFReader(path, "r+")
        reader.fields[key].parts[-1][0] = value
        reader.data.flush()
        return Blame(path.parent, tensor, words)

    return damage


def transposed(path: Path) -> Blame:
    with opened(path) as reader:
        sizes = info_of(reader, G_DOWN).field.parts[SHAPE]
        sizes[:] = sizes[::-1].copy()
    return Blame(reader.path, DOWN, "has shape [224, 96]; the model's config wants [96, 224]")


def one_less(path: Path) -> Blame:
    """The last tensor's info is taken for padding, and the data seems to start there."""
    with opened(path) as reader:
        reader.fields["GGUF.tensor_count"].parts[-1][0] -= 1
    return Blame(reader.path)


def file_sized(change: Callable[[bytes], bytes], words: str) -> Damage:
    def damage(path: Path) -> Blame:
        with opened(path) as reader:
            file: Path = reader.path
        file.write_bytes(change(file.read_bytes()))
        return Blame(file, "", words)

    return damage


def element(tensor: str, name: str, place: tuple[int, ...], value: float) -> Damage:
    def damage(path: Path) -> Blame:
        with opened(path, tensor) as reader:
            info_of(reader, tensor).data[place] = value
        return Blame(reader.path, name, f"element {list(place)} is {value}")

    return damage


def unknown_name(path: Path) -> Blame:
    with opened(path) as reader:
        info_of(reader, G_DOWN).field.parts[NAME][-8] = ord("x")
    return Blame(path if path == reader.path else path.parent, DOWN, "is missing")


TRUNCATED = "truncated"
GGUFS: dict[str, Damage] = {
    "cut": file_sized(lambda raw: raw[:-100], TRUNCATED),
    "cut in half": file_sized(lambda raw: raw[: len(raw) // 2], TRUNCATED),
    "cut in the header": file_sized(lambda raw: raw[:80], TRUNCATED),
    "cut in the magic": file_sized(lambda raw: raw[:3], TRUNCATED),
    "empty": file_sized(lambda raw: b"", TRUNCATED),
    "bytes more": file_sized(lambda raw: raw + bytes(64), "64 bytes of data belong to no tensor"),
    "zeros": file_sized(lambda raw: bytes(len(raw)), "not a GGUF file"),
    "2^63 tensors": in_field("GGUF.tensor_count", HUGE, TRUNCATED),
    "2^63 pairs": in_field("GGUF.kv_count", HUGE, TRUNCATED),
    "a tensor more": in_field("GGUF.tensor_count", 22, ""),
    "a tensor less": one_less,
    "a pair more": in_field("GGUF.kv_count", 30, ""),
    "a pair less": in_field("GGUF.kv_count", 2, ""),
    "version 7": in_field("GGUF.version", 7, "version 7"),
    "name of 2^63": in_info(NAME_LENGTH, HUGE, TRUNCATED),
    "name that is no text": in_info(NAME, 0xFF, "not valid UTF-8"),
    "past the end": in_info(OFFSET, 1 << 40, TRUNCATED, G_DOWN),
    "offset of 2^63": in_info(OFFSET, HUGE // 32 * 32, TRUNCATED, G_DOWN),
    "overlap": in_info(OFFSET, 32, "its data starts at", G_DOWN),
    "shape of 2^63": in_info(SHAPE, HUGE, TRUNCATED, G_DOWN),
    "shape that wraps": in_info(SHAPE, 2**62 + 224, TRUNCATED, G_DOWN),
    "no rows": in_info(SHAPE, 0, "impossible shape", G_DOWN),
    "transposed": transposed,
    "a layer less": in_metadata("llama.block_count", 1, "model.layers.1.", "is left over"),
    "a layer more": in_metadata("llama.block_count", 3, "model.layers.2.", "is missing"),
    "another width": in_metadata("llama.feed_forward_length", 256, "model.layers.0.mlp", "the model's config wants"),
    "smaller": in_info(SHAPE, 192, "what is before it ends at"),
    "I32": in_info(KIND, 26, "type I32 cannot be dequantized", G_DOWN),
    "F16": in_info(KIND, 1, "what is before it ends at"),
    "unknown type": in_info(KIND, 77, "unknown type 77", G_DOWN),
    "renamed": unknown_name,
    "NaN in a norm": element(G_NORM, NORM, (95,), np.nan),
    "NaN in a linear": element(G_DOWN, DOWN, (40, 200), np.nan),
    "infinity": element("token_embd.weight", "model.embed_tokens.weight", (299, 1), np.inf),
    "minus infinity": element("blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight", (0, 0), -np.inf),
}


@pytest.mark.parametrize("container", ["gguf", "split"])
@pytest.mark.parametrize("damage", GGUFS)
def test_gguf(originals: dict[str, Path], tmp_path: Path, container: str, damage: str) -> None:
    path = copied(originals[container], tmp_path)
    assert_refused(path, GGUFS[damage](path))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_of_blocks_that_is_not_finite(tiny: Models, tmp_path: Path, value: float) -> None:
    path = copied(tiny.gguf("gguf-llama", "Q8_0"), tmp_path)
    with opened(path) as reader:
        info_of(reader, G_DOWN).data[30, 2 * 34 : 2 * 34 + 2] = np.array([value], np.float16).view(np.uint8)
    with pytest.raises(CheckpointError, match=rf"{path}: tensor '{DOWN}': element \[30, (6[4-9]|[78]\d|9[0-5])\] is"):
        load(path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_factors_of_rope_that_are_not_finite(tiny: Models, tmp_path: Path, value: float) -> None:
    path = copied(tiny.gguf("gguf-rope3"), tmp_path)
    blame = element("rope_freqs.weight", "rope_freqs.weight", (3,), value)(path)
    assert_refused(path, blame)


# The files of a split model


def part(path: Path, number: int) -> Path:
    return path.with_name(path.name.replace("-00001-", f"-{number:05}-"))


def part_removed(path: Path) -> Blame:
    part(path, 2).unlink()
    return Blame(part(path, 2), "", f"no such file; {path} is one of 3 files")


def part_a_directory(path: Path) -> Blame:
    part(path, 2).unlink()
    part(path, 2).mkdir()
    return Blame(part(path, 2), "", "no such file")


def parts_exchanged(path: Path) -> Blame:
    part(path, 2).rename(path.with_name("spare"))
    part(path, 3).rename(part(path, 2))
    path.with_name("spare").rename(part(path, 3))
    return Blame(part(path, 2), "", "is file 3 of 3 of a split model, not what its name says")


def part_twice(path: Path) -> Blame:
    """With its number made to fit, so that only its tensors tell."""
    shutil.copy(part(path, 3), part(path, 2))
    return in_part(2, "split.no", 1, G_DOWN, "too", blamed=3)(path)


def in_part(number: int, key: str, value: int, tensor: str, words: str, blamed: int | None = None) -> Damage:
    def damage(path: Path) -> Blame:
        reader = gguf.GGUFReader(part(path, number), "r+")
        reader.fields[key].parts[-1][0] = value
        reader.data.flush()
        return Blame(part(path, blamed or number), tensor, words)

    return damage


def whole_model_as_a_part(path: Path) -> Blame:
    shutil.copy(path.with_name("whole.gguf"), part(path, 3))
    return Blame(part(path, 3), "", "is file 1 of 0 of a split model")


SPLITS: dict[str, Damage] = {
    "a file is removed": part_removed,
    "a file is a directory": part_a_directory,
    "files exchanged": parts_exchanged,
    "a file twice": part_twice,
    "another number": in_part(2, "split.no", 2, "", "is file 3 of 3"),
    "another count": in_part(3, "split.count", 4, "", "is file 3 of 4"),
    "the first has another count": in_part(1, "split.count", 5, "", "name does not end in -00001-of-00005.gguf"),
    "a count of none": in_part(1, "split.count", 0, "", "is missing"),
    "tensors of all files": in_part(1, "split.tensors.count", 20, "", "split.tensors.count is 20"),
    "the whole as a part": whole_model_as_a_part,
}


@pytest.mark.parametrize("damage", SPLITS)
def test_split_models(originals: dict[str, Path], tmp_path: Path, damage: str) -> None:
    path = copied(originals["split"], tmp_path)
    shutil.copy(originals["gguf"], tmp_path / "whole.gguf")
    assert_refused(path, SPLITS[damage](path))


# Whatever the container


@pytest.mark.parametrize("container", ["file", "shards"])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_config_of_another_size(originals: dict[str, Path], tmp_path: Path, container: str, layers: int) -> None:
    path = copied(originals[container], tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    words = "is left over" if layers == 1 else "is missing"
    assert_refused(path, Blame(path, f"model.layers.{min(layers, 2)}.", words))


STRUCTURAL = ["cut by a byte", "header of 2^63", "transposed", "I32", "missing", "left over", "renamed", "overlap"]


@pytest.mark.parametrize("damage", STRUCTURAL)
@pytest.mark.parametrize("container", ["file", "shards"])
def test_every_rank_refuses(originals: dict[str, Path], tmp_path: Path, container: str, damage: str) -> None:
    """Also one that would read nothing of the damaged tensor."""
    path = copied(originals[container], tmp_path)
    blame = SAFETENSORS[damage](path)
    for rank in range(2):
        assert_refused(path, blame, (1, 1), rank)


@pytest.mark.parametrize(
    ("container", "damage"), [("file", "NaN in a norm"), ("shards", "cut in half"), ("split", "cut")]
)
def test_the_command_line(
    originals: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], container: str, damage: str
) -> None:
    """One line that names file and tensor, nothing on stdout, exit code 2."""
    path = copied(originals[container], tmp_path)
    blame = ({**GGUFS, **SAFETENSORS} if container != "split" else GGUFS)[damage](path)
    code = main(["generate", str(path), "--prompt-ids", "5,6,7", "--backend", "torch"])
    out, err = capfd.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("serried generate: error: ")
    assert str(blame.file) in err
    assert blame.tensor in err


Weights = list[Any]


def weights_of(path: Path) -> Weights:
    return [parameter.value for parameter in load(path).parameters]


@pytest.fixture(scope="module")
def wanted(originals: dict[str, Path]) -> dict[str, Weights]:
    return {container: weights_of(originals[container]) for container in ("file", "gguf")}


def refused_or_the_same(path: Path, before: Weights) -> None:
    """A file that loads after all must give the very weights that it gave before."""
    try:
        got = weights_of(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        assert all(np.array_equal(a, b) for a, b in zip(got, before, strict=True))


quick = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(data=st.data())
def test_any_byte_of_a_safetensors_header(
    originals: dict[str, Path], wanted: dict[str, Weights], tmp_path: Path, data: Any
) -> None:
    path = tmp_path / "model"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(originals["file"], path)
    file = path / "model.safetensors"
    raw = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, 7 + Stored(file).length))
    raw[at] = data.draw(st.integers(0, 255) | st.sampled_from(b'0123456789",[]{}'))
    file.write_bytes(raw)
    refused_or_the_same(path, wanted["file"])


@quick
@given(data=st.data())
def test_any_byte_of_the_tensor_infos_of_a_gguf(
    originals: dict[str, Path], wanted: dict[str, Weights], tmp_path: Path, data: Any
) -> None:
    reader = gguf.GGUFReader(originals["gguf"])
    first, last = reader.tensors[0].field.offset, reader.tensors[-1].field.offset
    file = tmp_path / "model.gguf"
    raw = bytearray(originals["gguf"].read_bytes())
    raw[data.draw(st.integers(first, last + 60))] = data.draw(st.integers(0, 255))
    file.write_bytes(raw)
    refused_or_the_same(file, wanted["gguf"])
