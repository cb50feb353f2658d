"""The figures of a serving benchmark, as `vllm bench serve` defines them. Pure.

TTFT: from sending a request to its first token. TPOT: the mean time of each token after the first. ITL: between two
pieces of the stream. E2EL: from sending to the last token. Goodput: requests a second that keep all their bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serried.errors import InputError

BOUNDS = ("ttft", "tpot", "e2el")


@dataclass
class Record:
    """What became of one request. Times in seconds from the start of the run; pieces: when each came.

    input_tokens: None where the server does not say.
    """

    sent: float
    pieces: list[float] = field(default_factory=list)
    done: float = 0.0
    input_tokens: int | None = None
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.pieces[0] - self.sent

    @property
    def e2el(self) -> float:
        return self.pieces[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """None for an answer of one token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]


def parse_bounds(text: str | None) -> dict[str, float]:
    """`ttft:500,tpot:50` (milliseconds) as seconds."""
    bounds: dict[str, float] = {}
    for part in filter(None, (text or "").split(",")):
        name, _, value = part.partition(":")
        try:
            bounds[name] = float(value) / 1e3
        except ValueError:
            bounds[name] = -1.0
        if name not in BOUNDS or not bounds[name] > 0:
            raise InputError(f"--goodput {part}: expected {', '.join(BOUNDS)} with milliseconds, like ttft:500,tpot:50")
    return bounds


def summarize(records: Sequence[Record], duration: float, bounds: Mapping[str, float]) -> dict[str, Any]:
    """All figures of a run that took `duration` seconds; times in milliseconds."""
    done = [record for record in records if record.error is None and record.pieces]
    failed = [record.error or "no token came" for record in records if record not in done]
    output = sum(record.output_tokens for record in done)
    counted = [record.input_tokens for record in done if record.input_tokens is not None]
    given = sum(counted) if len(counted) == len(done) else None
    result: dict[str, Any] = {
        "completed": len(done),
        "failed": len(failed),
        "duration_s": duration,
        "input_tokens": given,
        "output_tokens": output,
        "requests_per_s": len(done) / duration,
        "output_tokens_per_s": output / duration,
        "total_tokens_per_s": None if given is None else (given + output) / duration,
    }
    series = {
        "ttft": [record.ttft for record in done],
        "tpot": [tpot for record in done if (tpot := record.tpot) is not None],
        "itl": [gap for record in done for gap in record.itl],
        "e2el": [record.e2el for record in done],
    }
    for name, values in series.items():
        for label, value in _digest(values).items():
            result[f"{label}_{name}_ms"] = value
    if bounds:
        good = [record for record in done if all(_within(record, name, most) for name, most in bounds.items())]
        result["goodput_requests_per_s"] = len(good) / duration
    if failed:
        result["first_error"] = failed[0]
    return result


def _digest(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"mean": None, "p50": None, "p99": None}
    ms = np.array(values) * 1e3
    return {"mean": float(ms.mean()), "p50": float(np.percentile(ms, 50)), "p99": float(np.percentile(ms, 99))}


def _within(record: Record, name: str, most: float) -> bool:
    value = getattr(record, name)
    return value is None or value <= most
