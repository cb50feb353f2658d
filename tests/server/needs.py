"""Packages of the extra `clients`: without it tests are skipped, with it a package that does not work is an error."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def need(*modules: str) -> None:
    """Skip all tests of a module where one of the packages is not installed. Imports come after it, and may fail."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (pip install 'serried[clients]')", allow_module_level=True)
