"""Makes tests/tiny_models.py importable everywhere (pytest puts this directory on the path), and caches its models."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import Models


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The tiny models, each made when a test first asks for it."""
    return Models(Path(tmp_path_factory.mktemp("tiny")))
