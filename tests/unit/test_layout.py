"""The groups of a world: the listed examples, vLLM's own formulas, and what holds of every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serried.errors import InputError
from serried.parallel.layout import KINDS, Coordinates, RankLayout

SIZES = st.integers(1, 4)


@st.composite
def layouts(draw: st.DrawFn) -> RankLayout:
    tp, pp, dp, pcp, external = (draw(SIZES) for _ in range(5))
    dcp = draw(st.sampled_from([n for n in range(1, tp + 1) if tp % n == 0]))
    return RankLayout(tp * pp * dp * pcp * external, tp, pp, dp, pcp, dcp)


def test_world_of_8_with_tp_2_and_pp_4() -> None:
    layout = RankLayout(8, tp=2, pp=4)
    assert layout.external_dp == 1
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("pp") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_world_of_16_with_tp_4_and_dp_4() -> None:
    layout = RankLayout(16, tp=4, pp=1, dp=4)
    assert layout.groups("tp") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert layout.groups("pp") == [[rank] for rank in range(16)]
    assert layout.groups("dp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert layout.groups("ep") == [list(range(16))]


def test_ep_groups_stay_within_a_stage() -> None:
    layout = RankLayout(8, tp=2, pp=2, dp=2)
    assert layout.groups("ep") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_dcp_splits_each_tp_group_into_runs() -> None:
    layout = RankLayout(8, tp=4, dcp=2)
    assert layout.external_dp == 2
    assert layout.groups("dcp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("external_dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@given(layouts())
def test_groups_are_those_of_vllm(layout: RankLayout) -> None:
    grid = np.arange(layout.world_size).reshape(-1, layout.dp, layout.pp, layout.pcp, layout.tp)

    def cut(ranks: Any, size: int) -> list[list[int]]:
        groups: list[list[int]] = ranks.reshape(-1, size).tolist()
        return groups

    assert layout.groups("tp") == cut(grid, layout.tp)
    assert layout.groups("dcp") == cut(grid, layout.dcp)
    assert layout.groups("pcp") == cut(grid.swapaxes(3, 4), layout.pcp)
    assert layout.groups("pp") == cut(grid.swapaxes(2, 4), layout.pp)
    assert layout.groups("dp") == cut(grid.swapaxes(1, 4), layout.dp)
    assert layout.groups("ep") == cut(grid.swapaxes(1, 2), layout.dp * layout.pcp * layout.tp)


@given(layouts())
def test_groups_of_each_kind_tile_the_world(layout: RankLayout) -> None:
    for kind in KINDS:
        groups = layout.groups(kind)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        assert len({len(group) for group in groups}) == 1
        assert all(group == sorted(group) for group in groups)


@given(layouts(), st.data())
def test_the_group_of_a_rank_differs_along_its_axis_only(layout: RankLayout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    own = layout.coordinates(rank)
    assert np.ravel_multi_index(own, layout.shape) == rank
    for axis in Coordinates._fields:
        group = layout.group_of(axis, rank)  # type: ignore[arg-type]  # every axis is a kind
        assert group[getattr(own, axis)] == rank
        assert [layout.coordinates(peer) for peer in group] == [
            own._replace(**{axis: index}) for index in range(getattr(layout, axis))
        ]
    assert set(layout.group_of("dcp", rank)) <= set(layout.group_of("tp", rank))
    assert set(layout.group_of("tp", rank)) <= set(layout.group_of("ep", rank))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"tp": 3},
            "--tensor-parallel-size 3: does not divide the world size 8; legal values are 1, 2, 4, 8",
        ),
        ({"tp": 2, "pp": 3}, "--pipeline-parallel-size 3: .* world size 8 / tp 2; legal values are 1, 2, 4$"),
        ({"tp": 4, "dp": 4}, "--data-parallel-size 4: .* legal values are 1, 2$"),
        ({"tp": 2, "pp": 2, "pcp": 4}, "--prefill-context-parallel-size 4: .* legal values are 1, 2$"),
        ({"tp": 4, "dcp": 3}, "--decode-context-parallel-size 3: .*size 4; legal values are 1, 2, 4$"),
        ({"dcp": 2}, "--decode-context-parallel-size 2: .* legal values are 1$"),
        ({"tp": 0}, "--tensor-parallel-size 0: must be at least 1"),
        ({"dp": -2}, "--data-parallel-size -2: must be at least 1"),
        ({"world_size": 0}, "--world-size 0: must be at least 1"),
    ],
)
def test_what_does_not_divide_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RankLayout(**{"world_size": 8, **sizes})


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    layout = RankLayout(8, tp=2)
    with pytest.raises(InputError, match="0 to 7"):
        layout.coordinates(rank)
    with pytest.raises(InputError, match="0 to 7"):
        layout.group_of("tp", rank)
