"""Comparing runs: with the first one, and with the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from serried.verify.run import RunResult

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Comparison:
    """One run held against the first run and, where there is one, the reference.

    rms_share_reference: the root mean square of the differences to the reference, as a share of its logits' spread.
    """

    run: RunResult
    max_abs_logit_diff: float
    bitwise_equal: bool
    tokens_equal: bool
    max_abs_diff_reference: float | None
    rms_share_reference: float | None
    logit_std: float

    def to_json(self) -> dict[str, Any]:
        run = self.run
        return {
            "tp": run.tp,
            "ranks": [asdict(rank) for rank in run.ranks],
            "all_reduces_prefill": run.all_reduces_prefill,
            "collective_bytes_prefill": run.collective_bytes_prefill,
            "max_abs_logit_diff": self.max_abs_logit_diff,
            "bitwise_equal": self.bitwise_equal,
            "tokens_equal": self.tokens_equal,
            "tokens": run.tokens,
            "max_abs_diff_reference": self.max_abs_diff_reference,
            "rms_share_reference": self.rms_share_reference,
            "logit_std": self.logit_std,
        }


def compare(
    first: RunResult, run: RunResult, reference: Logits | None, prompt_length: int, *, binding: bool
) -> Comparison:
    """Hold a run against the first run and the reference's logits for the run's own tokens.

    tokens_equal: the run's tokens are the first run's and, where the reference is binding (it is exact, so it says
    nothing of the tokens of a run in a lower precision), its greedy ones.
    """
    same = run.logits.shape == first.logits.shape
    return Comparison(
        run=run,
        max_abs_logit_diff=max_abs_diff(run.logits, first.logits),
        bitwise_equal=same and bool((run.logits.view(np.int32) == first.logits.view(np.int32)).all()),
        tokens_equal=run.tokens == first.tokens
        and (reference is None or not binding or greedy(reference, prompt_length) == run.tokens),
        max_abs_diff_reference=None if reference is None else max_abs_diff(run.logits, reference),
        rms_share_reference=None if reference is None else rms_share(run.logits, reference),
        logit_std=float(run.logits.std()),
    )


def greedy(logits: Logits, prompt_length: int) -> list[int]:
    """The greedy choice at the end of the prompt and at every position after it."""
    return [int(i) for i in logits[prompt_length - 1 :].argmax(-1)]


def max_abs_diff(a: Logits, b: Logits) -> float:
    """The largest difference; infinite where a value is not a number, so that it can never pass."""
    difference = float(np.abs(a - b).max())
    return difference if np.isfinite(difference) else float("inf")


def rms_share(found: Logits, reference: Logits) -> float:
    """The root mean square of the differences over the reference's standard deviation; infinite for a NaN."""
    difference = float(np.sqrt(np.square(found - reference, dtype=np.float64).mean()))
    return difference / float(reference.std()) if np.isfinite(difference) else float("inf")


@dataclass(frozen=True)
class Bounds:
    """What must hold of logits.

    first: largest difference to the first run. reference: largest difference to the reference (None: not binding).
    reference_share: root mean square of these differences over the logits' spread (None: not asked for).
    """

    first: float
    reference: float | None
    reference_share: float | None = None


def holds(comparisons: Sequence[Comparison], bounds: Bounds, *, to_the_bit: bool = False) -> bool:
    """Whether all runs have equal tokens and logits within the bounds."""
    return all(
        c.tokens_equal
        and c.max_abs_logit_diff <= bounds.first
        and (c.bitwise_equal or not to_the_bit)
        and _within(c.max_abs_diff_reference, bounds.reference)
        and _within(c.rms_share_reference, bounds.reference_share)
        for c in comparisons
    )


def _within(value: float | None, bound: float | None) -> bool:
    return value is None or bound is None or value <= bound
