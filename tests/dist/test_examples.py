"""Every file in examples/ runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from serried.errors import InputError
from serried.models.registry import demo_path

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_runs(file: Path) -> None:
    try:
        demo_path()
    except InputError as error:
        pytest.skip(str(error))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_there_are_examples() -> None:
    assert EXAMPLES
