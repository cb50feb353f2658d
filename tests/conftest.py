"""Makes tests/tiny_models.py importable everywhere (pytest puts this directory on the path), and caches its models."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tiny_models import Models

# A shell without job control starts what runs in its background with SIGINT ignored, and so would be every process
# that a test starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The tiny models, each made when a test first asks for it."""
    return Models(Path(tmp_path_factory.mktemp("tiny")))
