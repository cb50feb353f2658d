"""The checks and helpers of tests/dist serve here too. All of this needs the extension."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))


@pytest.fixture(scope="session", autouse=True)
def core() -> object:
    """The extension module; without it nothing here can run."""
    try:
        return importlib.import_module("serried._native._core")
    except ImportError as error:
        pytest.skip(f"Serried was installed without its extension: {error}")
