"""The choice of an all-reduce's algorithm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serried.errors import InputError
from serried.parallel.select import (
    ALGORITHMS,
    CHOICES,
    DEFAULT_TABLE,
    AlgorithmTable,
    Operation,
    Sample,
    Switch,
    choose,
    measured_table,
)

OPERATIONS: list[Operation] = ["all_reduce", "reduce_nodes"]
KB = 1024


@pytest.mark.parametrize("operation", OPERATIONS)
@given(st.integers(0, 1 << 30), st.integers(1, 64))
def test_the_default_table(operation: Operation, nbytes: int, ranks: int) -> None:
    """Small messages take one shot; once large enough for two, larger ones are; a ring is never chosen."""
    chosen = choose(operation, nbytes, ranks)
    assert chosen in ("one-shot", "two-shot")
    if nbytes <= 8 * KB or ranks <= 2:
        assert chosen == "one-shot"
    if chosen == "two-shot":
        assert choose(operation, 2 * nbytes, ranks) == "two-shot"
        assert choose(operation, nbytes, ranks + 1) == "two-shot"
    if ranks > 2 and nbytes >= 1024 * KB:
        assert chosen == "two-shot"


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_user_decides(operation: Operation, algorithm: str) -> None:
    if (operation, algorithm) == ("reduce_nodes", "ring"):
        with pytest.raises(InputError, match="bench only"):
            choose(operation, 0, 4, algorithm=algorithm)
    else:
        assert choose(operation, 0, 4, algorithm=algorithm) == algorithm


def test_a_wrong_name() -> None:
    with pytest.raises(InputError, match="tree: choose one of auto, one-shot, two-shot, ring"):
        choose("all_reduce", 1, 2, algorithm="tree")
    assert CHOICES[0] == "auto"


def test_the_nearest_smaller_world_counts() -> None:
    table = AlgorithmTable((Switch("all_reduce", 2, 100), Switch("all_reduce", 8, 10)))
    found = [choose("all_reduce", 50, ranks, table) for ranks in (1, 2, 7, 8, 16)]
    assert found == ["one-shot", "one-shot", "one-shot", "two-shot", "two-shot"]
    assert choose("reduce_nodes", 1 << 40, 16, table) == "one-shot"


def test_a_measured_table() -> None:
    """Two-shot from where on it wins for good; what won by chance at one size does not count."""

    def samples(*ratios: float) -> list[Sample]:
        """At 1, 2, 4, ... KiB: one-shot takes 1 s, two-shot the ratio."""
        taken = []
        for i, ratio in enumerate(ratios):
            nbytes = KB << i
            taken += [Sample(nbytes, "one-shot", 1.0), Sample(nbytes, "two-shot", ratio)]
            taken += [Sample(nbytes, "one-shot", 9.0), Sample(nbytes, "ring", 0.1)]
        return taken

    table = measured_table(
        {
            ("all_reduce", 2): samples(2, 0.9, 1.1, 0.8, 0.5),
            ("all_reduce", 4): samples(0.9, 0.9),
            ("all_reduce", 8): samples(2, 2, 2),
        }
    )
    assert table.measured
    assert not DEFAULT_TABLE.measured
    assert [choose("all_reduce", kb * KB, 2, table) == "two-shot" for kb in (1, 2, 4, 8, 16, 32)] == [False] * 3 + [
        True
    ] * 3
    assert choose("all_reduce", KB, 4, table) == "two-shot"
    assert choose("all_reduce", 1 << 40, 8, table) == "one-shot"
