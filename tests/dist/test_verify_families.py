"""`serried verify` on families and kinds of RoPE beside Llama's: the runs agree, and so does the reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import Models

from serried.cli.main import main

PROMPT = ",".join(str(7 * i % 250) for i in range(70))  # longer than the windows, and than what longrope is short for


@pytest.mark.parametrize("name", ["split-gemma2", "gguf-gemma3", "longest-phi3-partial", "longest-dynamic"])
def test_it_holds(tiny: Models, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    path: Path = tiny.gguf(name) if name.startswith("gguf-") else tiny.directory(name)
    options = ["--dtype", "float32", "--threads-per-rank", "1", "--tokens", "4", "--prompt-ids", PROMPT, "--json"]
    code = main(["verify", str(path), "-tp", "1,2", *options])
    report = json.loads(capfd.readouterr().out)
    assert code == 0
    for run in report["runs"]:
        assert run["tokens_equal"] is True
        assert run["bitwise_equal"] is True
        assert run["max_abs_diff_reference"] < 1e-4
