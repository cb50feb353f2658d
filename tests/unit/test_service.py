"""The figures that an engine gives of itself."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from serried.engine.interface import RankStats
from serried.engine.service import EngineService
from serried.engine.wire import Figures
from serried.engine.worker import RankTimes


def test_a_rank_is_idle_only_for_as_long_as_it_has_said() -> None:
    """Ranks tell their times once a second; what they did since must not be counted as idleness."""
    pool = SimpleNamespace(blocks=4, free=3)
    scheduler = SimpleNamespace(
        running=[], waiting=[], pool=pool, counters=SimpleNamespace(queried=0, hit=0, preemptions=0)
    )
    core: Any = SimpleNamespace(scheduler=scheduler, steps=0, idle=True)
    executor: Any = SimpleNamespace(rank_times=lambda: [RankTimes(0.01, 0.02)])
    sent: list[Any] = []
    service = EngineService(core, executor, None, 1, sent.append)
    time.sleep(0.05)
    service.step()
    (told,) = sent
    assert isinstance(told, Figures)
    (rank,) = told.stats.ranks
    assert isinstance(rank, RankStats) and 0.02 <= rank.idle < 10
    time.sleep(0.02)
    assert service.stats().ranks == [rank]
