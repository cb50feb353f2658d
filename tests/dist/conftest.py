"""Worlds of 2, 3 and 5 ranks, started once for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import World


@pytest.fixture(scope="session", params=[2, 3, 5])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.close()
