"""The workload and the figures of the serving benchmark."""

from __future__ import annotations

import math

import pytest

from serried.bench.serving_metrics import Record, parse_bounds, summarize
from serried.bench.workload import Workload
from serried.errors import InputError


def record(sent: float, pieces: list[float], tokens: int, error: str | None = None) -> Record:
    return Record(sent, pieces, pieces[-1] if pieces else sent, 10, tokens, error)


def test_the_figures_are_those_of_vllm() -> None:
    records = [
        record(0.0, [0.5, 0.6, 0.8, 0.8], 4),
        record(1.0, [1.1], 1),
        record(1.0, [], 0, "status 500"),
    ]
    found = summarize(records, 2.0, parse_bounds("ttft:200,e2el:500"))
    assert (found["completed"], found["failed"], found["first_error"]) == (2, 1, "status 500")
    assert (found["output_tokens"], found["output_tokens_per_s"], found["requests_per_s"]) == (5, 2.5, 1.0)
    assert found["mean_ttft_ms"] == pytest.approx(300)
    assert found["mean_tpot_ms"] == pytest.approx(100)  # of the one with more than one token: 0.3 s for 3
    assert found["p50_itl_ms"] == pytest.approx(100)
    assert found["mean_e2el_ms"] == pytest.approx(450)
    assert found["goodput_requests_per_s"] == pytest.approx(0.5)


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "latency:5", "tpot:0", "tpot:-3"])
def test_bounds_that_make_no_sense(text: str) -> None:
    with pytest.raises(InputError, match="--goodput"):
        parse_bounds(text)


def test_prompts_are_the_same_for_a_seed_and_share_their_prefix() -> None:
    one = Workload(5, 20, 4, "shared-prefix", 12, vocab_size=500, seed=3)
    prompts = one.prompts()
    assert prompts == Workload(5, 20, 4, "shared-prefix", 12, vocab_size=500, seed=3).prompts()
    assert len({tuple(prompt[:12]) for prompt in prompts}) == 1 and len({tuple(p) for p in prompts}) == 5
    assert all(len(prompt) == 20 and max(prompt) < 500 for prompt in prompts)
    words = Workload(3, 20, 4, "shared-prefix", 12).prompts()
    assert all(isinstance(text, str) and len(text.split()) == 20 for text in words)


def test_arrivals() -> None:
    assert list(Workload(4, 2, 2).arrivals()) == [0, 0, 0, 0]
    at = list(Workload(4000, 2, 2, request_rate=10.0).arrivals())
    assert at == sorted(at) and at[0] == 0
    assert math.isclose(at[-1] / len(at), 0.1, rel_tol=0.1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "burst"}, "--workload burst"),
        ({"requests": 0}, "--requests 0"),
        ({"request_rate": 0.0}, "--request-rate"),
        ({"request_rate": math.nan}, "--request-rate"),
        ({"prefix_len": 20}, "--prefix-len 20"),
    ],
)
def test_workloads_that_cannot_be(options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Workload(**{"requests": 1, "input_len": 20, "output_len": 1, **options})  # type: ignore[arg-type]
