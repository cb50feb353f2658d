"""One server for most tests of a module, with its engine as it was after each."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from fakes import FakeEngine, Served, counted, served


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with served(FakeEngine()) as running:
        yield running


@pytest.fixture
def server(shared: Served) -> Iterator[Served]:
    engine = shared.engine
    engine.asked.clear()
    engine.generated = 0
    yield shared
    engine.say, engine.delay, engine.error, engine.error_after = counted, 0.0, None, 0
    engine.ready_error = engine.failure = None
    engine.hold.clear()
    assert shared.idle(), "a request still runs"


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made
