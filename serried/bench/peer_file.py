"""The GGUF files that `serried bench peers` measures: found, or written with dummy weights."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serried.bench.dummy_gguf import TYPES, write_dummy_gguf
from serried.errors import InputError
from serried.models.config import ModelConfig
from serried.models.registry import demo_path, open_model, preset_names
from serried.progress import progress_bar
from serried.weights.gguf_file import GGUFFile


@dataclass(frozen=True)
class PeerFile:
    """A GGUF file to measure: what the user calls it, where it is, its config.

    weight_bytes: of the matrices that a step multiplies. types: theirs, each with how many are of it.
    """

    name: str
    path: Path
    config: ModelConfig
    weight_bytes: int
    types: str


def find_file(model: str, folder: Path, seed: int) -> PeerFile:
    """The file that a user's word means; a preset's is written first, unless the folder has it."""
    preset, _, kind = model.partition(":")
    if model == "demo":
        path = demo_path()
    elif Path(model).suffix == ".gguf":
        path = Path(model)
    elif preset in preset_names() and kind in TYPES:
        path = folder / f"{preset}-{kind}-{seed}.gguf"
        if not path.is_file():
            with progress_bar(f"writing {model}") as progress:
                write_dummy_gguf(path, open_model(preset).config, preset, kind, seed, progress)
    else:
        raise InputError(
            f"bench peers: {model}: expected `demo`, a .gguf file, or PRESET:TYPE like qwen3-0.6b:Q8_0, with a preset "
            f"of {', '.join(preset_names())} and a type of {', '.join(TYPES)}"
        )
    source = open_model(str(path))
    if source.gguf is None:
        raise InputError(f"bench peers: {model}: not a GGUF file, which is what both engines read")
    weight_bytes, types = _matrices(source.gguf, tied=source.config.tied)
    source.gguf.close()
    return PeerFile(model, path.resolve(), source.config, weight_bytes, types)


def _matrices(file: GGUFFile, *, tied: bool) -> tuple[int, str]:
    """Bytes and types of the matrices that a step multiplies: not of an embedding that is only looked up."""
    used = [t for name, t in file.tensors.items() if len(t.shape) > 1 and (tied or name != "token_embd.weight")]
    counts = Counter(tensor.type.name for tensor in used)
    return sum(tensor.nbytes for tensor in used), ", ".join(f"{count} {name}" for name, count in counts.most_common())


@contextmanager
def folder_for(cache_dir: str | None) -> Iterator[Path]:
    """The user's folder, or one that is removed at the end."""
    if cache_dir is not None:
        yield Path(cache_dir)
        return
    with tempfile.TemporaryDirectory(prefix="serried-peers-") as folder:
        yield Path(folder)
