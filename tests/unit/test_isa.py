"""Which instruction set ranks agree on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from serried import _native
from serried.backends.registry import agreed_isa

SKYLAKE = ["baseline", "avx2", "avx512"]
ALDER_LAKE = ["baseline", "avx2", "avx2_vnni"]
ZEN4 = ["baseline", "avx2", "avx512", "avx512_bf16"]
SAPPHIRE_RAPIDS = ["baseline", "avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx"]


class Ranks:
    """A group whose other ranks bring what they would have brought."""

    def __init__(self, others: list[Any]) -> None:
        self.others, self.size = others, len(others) + 1

    def all_gather(self, own: Any, parts: Any) -> Any:
        return np.concatenate([own, *self.others])


class Alone(Ranks):
    """Keeps what a rank brings."""

    def all_gather(self, own: Any, parts: Any) -> Any:
        self.brought = own
        return own


def bring(monkeypatch: pytest.MonkeyPatch, isas: list[str], chosen: str | None = None) -> Any:
    monkeypatch.setattr(_native, "runnable_isas", lambda: isas)
    monkeypatch.setattr(_native, "choose_isa", lambda: chosen or isas[-1])
    alone: Any = Alone([])
    assert agreed_isa(alone) == (chosen or isas[-1])
    return alone.brought


@pytest.mark.parametrize(
    ("mine", "others", "agreed"),
    [
        (ZEN4, [ZEN4], "avx512_bf16"),
        (SAPPHIRE_RAPIDS, [ZEN4, SAPPHIRE_RAPIDS], "avx512_bf16"),
        (ALDER_LAKE, [SAPPHIRE_RAPIDS], "avx2_vnni"),
        (ALDER_LAKE, [SKYLAKE], "avx2"),  # the lower of the two is one that the other does not have
        (SKYLAKE, [ALDER_LAKE], "avx2"),
        (SAPPHIRE_RAPIDS, [["baseline"]], "baseline"),
    ],
)
def test_the_best_that_all_have(
    monkeypatch: pytest.MonkeyPatch, mine: list[str], others: list[list[str]], agreed: str
) -> None:
    brought = [bring(monkeypatch, isas) for isas in others]
    bring(monkeypatch, mine)
    ranks: Any = Ranks(brought)
    assert agreed_isa(ranks) == agreed


def test_a_forced_one_is_the_most_that_a_rank_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    forced = bring(monkeypatch, SAPPHIRE_RAPIDS, "avx2")
    bring(monkeypatch, ZEN4)
    ranks: Any = Ranks([forced])
    assert agreed_isa(ranks) == "avx2"


def test_the_list_is_in_order() -> None:
    for isas in (SKYLAKE, ALDER_LAKE, ZEN4, SAPPHIRE_RAPIDS):
        assert isas == [isa for isa in _native.ISAS if isa in isas]
    if _native.available():
        assert _native.core.cpu_isas() == [isa for isa in _native.ISAS if isa in _native.core.cpu_isas()]
