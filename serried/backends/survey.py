"""Survey: what a rank says of a row of logits when more than its best token may be needed. In NumPy.

The native backend's is csrc/kernels/survey.hpp: the same places, and sums that may differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serried.backends.philox import gumbel_noise, pick_rows

Logits = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

LEAF = 64  # vocabulary rows; no edge between ranks cuts one
NOTHING: Float64 = np.empty(0, np.float64)


@dataclass(frozen=True)
class Survey:
    """Of one row: how many of its logits are above -inf, and the places of the largest (logit down, place up).

    leaf_max, leaf_sum: where asked for, of each leaf of 64 the maximum / divisor, and the sum of
    exp((logit - maximum) / divisor).
    """

    possible: int
    places: Int64
    leaf_max: Float64
    leaf_sum: Float64


def survey_row(logits: Logits, count: int, divisor: float, sums: bool) -> Survey:
    """The survey of one row with at most `count` places."""
    possible = int(np.count_nonzero(logits > -np.inf))
    places = best(logits, min(count, possible))
    leaves = leaf_sums(logits.astype(np.float64) / divisor) if sums else (NOTHING, NOTHING)
    return Survey(possible, places, *leaves)


def best(scores: Float64 | Logits, count: int) -> Int64:
    """The places of the `count` largest scores, in the order (score down, place up)."""
    if 0 < count < scores.size:
        places = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    else:
        places = np.arange(scores.size)
    return places[np.lexsort((places, -scores[places]))][:count]


def leaf_sums(scaled: Float64) -> tuple[Float64, Float64]:
    """Of each leaf of 64 scores the maximum, and the sum of exp(score - maximum); a leaf of -inf has the sum 0."""
    padded = np.full(-(-scaled.size // LEAF) * LEAF, -np.inf)
    padded[: scaled.size] = scaled
    leaves = padded.reshape(-1, LEAF)
    maxima = leaves.max(axis=1)
    return maxima, np.exp(leaves - np.maximum(maxima, -1e308)[:, None]).sum(axis=1)


class NumpyChoices:
    """A program's `pick`, `survey` and `noise`: see Program."""

    def pick(
        self,
        logits: Logits,
        first: int,
        temperatures: Float64,
        seeds: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.int32],
    ) -> tuple[Int64, Float64]:
        return pick_rows(logits, first, temperatures, seeds, positions)

    def survey(
        self,
        logits: Logits,
        rows: Sequence[int],
        counts: Sequence[int],
        divisors: Sequence[float],
        sums: Sequence[bool],
    ) -> list[Survey]:
        how = zip(rows, counts, divisors, sums, strict=True)
        return [survey_row(logits[row], count, divisor, summed) for row, count, divisor, summed in how]

    def noise(self, seed: int, position: int, ids: Int64) -> Float64:
        return gumbel_noise(seed, position, ids)
