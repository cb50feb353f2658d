"""The `llm` command with this server as one of its models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import HERMES, FakeEngine, Served, served
from needs import need

need("llm")


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with served(FakeEngine(template=HERMES), api_key=("secret",)) as running:
        yield running


@pytest.fixture(scope="module")
def home(shared: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of its settings. JSON is YAML too."""
    folder: Path = tmp_path_factory.mktemp("llm")
    model: dict[str, Any] = {
        "model_id": "served",
        "model_name": "tiny",
        "api_base": f"{shared.url}/v1",
        "api_key_name": "serried",
    }
    model |= {"supports_tools": True, "supports_schema": True}
    (folder / "extra-openai-models.yaml").write_text(json.dumps([model]))
    (folder / "keys.json").write_text(json.dumps({"serried": "secret"}))
    return folder


def llm(home: Path, *words: str) -> str:
    # Without its plugins: the demo model's package is one, and would be run by llama.cpp.
    environment = {**os.environ, "LLM_USER_PATH": str(home), "LLM_LOAD_PLUGINS": ""}
    command = [sys.executable, "-m", "llm", *words]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, input="", timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_chat_that_goes_on(server: Served, home: Path) -> None:
    server.engine.say = lambda prompt, index: f"answer {len(server.engine.asked)} 😀"
    assert llm(home, "-m", "served", "-s", "Be brief.", "-o", "temperature", "0.5", "Hello") == "answer 1 😀\n"
    assert server.engine.asked[0]["params"].temperature == 0.5
    assert llm(home, "-c", "And then?") == "answer 2 😀\n"
    assert server.engine.tokenizer is not None
    said = server.engine.tokenizer.decode(server.engine.asked[1]["prompt"], skip_special=False)
    for part in ("Be brief.", "Hello", "answer 1 😀", "And then?"):
        assert part in said


def test_a_schema_without_a_stream(server: Served, home: Path) -> None:
    server.engine.say = lambda prompt, index: '{"name": "Oslo"}'
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    assert json.loads(llm(home, "-m", "served", "--no-stream", "--schema", json.dumps(schema), "A city")) == {
        "name": "Oslo"
    }
    assert server.engine.asked[-1]["grammar"] is not None


def test_a_tool(server: Served, home: Path) -> None:
    """Its tool is called, and what that says goes back."""
    call = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call>'
    server.engine.say = lambda prompt, index: call if len(server.engine.asked) == 1 else "It is 42."
    code = "def double(number: int) -> str:\n    return f'twice {number} is {2 * number}'\n"
    assert "It is 42." in llm(home, "-m", "served", "--functions", code, "Twice 21?")
    assert server.engine.tokenizer is not None
    assert "twice 21 is 42" in server.engine.tokenizer.decode(server.engine.asked[-1]["prompt"])
