"""The figures beside a progress bar."""

from __future__ import annotations

import pytest

from serried import progress
from serried.progress import Meter


def test_tokens_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, drawn = [100.0], []
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    meter = Meter(lambda done, total, note="": drawn.append((done, total, note)), 2)
    for _ in range(10):  # ten tokens a second, seen twice
        now[0] += 0.1
        meter.take(1, answered=False)
    assert drawn[-1] == (0, 2, "10 tokens/s")
    now[0] += 0.001
    meter.take(1, answered=True)
    now[0] += 0.999
    meter.take(1989, answered=True)
    assert drawn[-1] == (2, 2, "1,000 tokens/s")
    assert len(drawn) <= 12


def test_nobody_looks() -> None:
    Meter(None, 1).take(1, answered=True)
