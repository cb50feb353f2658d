"""The checks of csrc/checks: kernels and collectives by themselves, in C++. `make checks` is the soak below."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2]


def run(program: str, *words: str) -> str:
    """A program of the package `cmake`, which the extra `test` installs."""
    command = [str(Path(sys.executable).with_name(program)), *words]
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def checked(build: Path, *targets: str) -> str:
    """Build the checks, or some of them, and run what is built."""
    run("cmake", "-S", str(SOURCE), "-B", str(build), "-DSERRIED_CHECKS=ON")
    run("cmake", "--build", str(build), "--parallel", "2", *(("--target", *targets) if targets else ()))
    only = ("-R", "|".join(targets)) if targets else ()
    return run("ctest", "--test-dir", str(build), "--output-on-failure", *only)


def test_some_checks(tmp_path: Path) -> None:
    assert "100% tests passed" in checked(tmp_path, "quant_check_baseline", "comm_check")


@pytest.mark.soak
def test_all_checks(tmp_path: Path) -> None:
    assert "100% tests passed" in checked(tmp_path)
