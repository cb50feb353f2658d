"""A GGUF file without a tokenizer (llama.cpp's `no_vocab`): ids go in and out, and text is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tiny_models import Models

from serried import LLM, SamplingParams
from serried.bench.dummy_gguf import write_dummy_gguf
from serried.models.registry import open_model


def generate(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serried", "generate", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)


def test_ids_alone(tiny: Models, tmp_path: Path) -> None:
    path = tmp_path / "dummy.gguf"
    write_dummy_gguf(path, open_model(str(tiny.directory("gguf-llama"))).config, "tiny", "BF16", 0, None)
    done = generate(str(path), "--prompt-ids", "1,2,3", "--max-tokens", "4", "--temperature", "0", "--json")
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout)["outputs"]
    with LLM(str(path)) as llm:
        assert llm.tokenizer is None
        expected = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))[0].outputs[0]
    assert (answer["token_ids"], answer["text"]) == (expected.token_ids, "")
    refused = generate(str(path), "Hello")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "has no tokenizer, so it cannot take text; give --prompt-ids" in refused.stderr
