"""Damage that only one rank can see, since it alone reads that part of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import Models

from serried import LLM
from serried.cli.main import main
from serried.errors import CheckpointError


@pytest.fixture
def damaged(tiny: Models, tmp_path: Path) -> Path:
    """A checkpoint with a NaN in the last row of the embedding, which is the last rank's."""
    path = tiny.copy("split-9-3", tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][-1, 5] = float("nan")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_it_is_bad_input_as_on_the_first_rank(damaged: Path, backend: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt-ids", "5,6,7", "-tp", "3", "--threads-per-rank", "1", "--backend", backend]
    code = main(["generate", str(damaged), *words])
    out, err = capfd.readouterr()
    message = f"{damaged / 'model.safetensors'}: tensor 'model.embed_tokens.weight': element [448, 5] is nan"
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"serried generate: error: {message}")


def test_in_python(damaged: Path) -> None:
    with pytest.raises(CheckpointError, match=r"element \[448, 5\] is nan"):
        LLM(str(damaged), 2, backend="torch", threads_per_rank=1)
