"""The choice of the next token. Each rank offers candidates of its own part of the vocabulary; rank 0 decides.

Greedy: the maximum. Temperature alone: Gumbel-max (the argmax of logit / temperature + noise is a draw from the
softmax), so again a rank offers one candidate. top_k: each rank offers its best k. min_p: candidates down to a known
distance from the best. top_p: candidates, and the vocabulary's log-sum-exp by leaves of 64 rows, which no edge between
ranks cuts; where top_k or min_p has cut, the sum over what they left. Noise is a function of the request's seed, the
position and the token id alone, and ties go to the lowest id: so a seeded request gives the same tokens in any batch
and under any split. A token whose logit is -inf is never chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serried.backends.base import Float64, Int64, Logits
from serried.backends.philox import gumbel_noise, pick_rows
from serried.backends.picks import NO_TOKEN
from serried.engine.wants import Want, columns

LEAF = 64  # vocabulary rows
NOTHING: Float64 = np.empty(0, np.float64)


@dataclass(frozen=True)
class Offer:
    """One rank's candidates for one row, best first: ids, and logit / temperature (or that plus noise).

    rows: how many ids the rank could offer.
    leaf_max, leaf_sum: where asked for, of each leaf of 64 rows the maximum, and the sum of exp(x - maximum).
    """

    rows: int
    ids: Int64
    scores: Float64
    leaf_max: Float64
    leaf_sum: Float64

    def pack(self) -> Float64:
        """All in one array; ids are below 2^53, so float64 holds them exactly."""
        head = np.array([self.rows, self.ids.size, self.leaf_max.size], np.float64)
        return np.concatenate([head, self.ids.astype(np.float64), self.scores, self.leaf_max, self.leaf_sum])

    @classmethod
    def unpack_all(cls, flat: Float64) -> list[Offer]:
        """The inverse of pack, for several one after the other."""
        offers = []
        while flat.size:
            rows, count, leaves = (int(word) for word in flat[:3])
            ids, scores, leaf_max, leaf_sum, flat = np.split(flat[3:], np.cumsum([count, count, leaves, leaves]))
            offers.append(cls(rows, ids.astype(np.int64), scores, leaf_max, leaf_sum))
        return offers


def make_offer(logits: Logits, first: int, want: Want, count: int) -> Offer:
    """A rank's offer for one row: float32 logits of the ids from `first` on, at most `count` candidates."""
    if logits.size == 0:
        return Offer(0, np.empty(0, np.int64), NOTHING, NOTHING, NOTHING)
    if want.single:
        places, scores = pick_rows(logits[None], first, *columns([want]))
        return Offer(logits.size, places + first, scores, NOTHING, NOTHING)
    scaled = logits.astype(np.float64) / want.divisor
    possible = int(np.count_nonzero(scaled > -np.inf))
    at = best(scaled, min(count, possible))
    leaves = leaf_sums(scaled) if want.needs_sum else (NOTHING, NOTHING)
    return Offer(possible, at + first, scaled[at], *leaves)


def decide(want: Want, offers: Sequence[Offer]) -> int | None:
    """The token (or NO_TOKEN), from the offers of all ranks in rank order; None where more candidates are needed."""
    ids = np.concatenate([offer.ids for offer in offers])
    scores = np.concatenate([offer.scores for offer in offers])
    order = np.lexsort((ids, -scores))
    ids, scores = ids[order], scores[order]
    if ids.size == 0 or not scores[0] > -np.inf:
        return NO_TOKEN
    if want.single:
        return int(ids[0])
    if want.top_k:
        ids, scores = ids[: want.top_k], scores[: want.top_k]
    kept = _kept(scores, want, offers)
    if kept is None:
        return None
    ids, scores = ids[:kept], scores[:kept]
    noisy = scores + gumbel_noise(want.seed, want.position, ids)
    return int(ids[noisy == noisy.max()].min())


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


def whole_sum(offers: Sequence[Offer], top: float) -> float:
    """The sum of exp(score - top) over the vocabulary: the leaves of all ranks, added one after the other."""
    maxima = np.concatenate([offer.leaf_max for offer in offers])
    sums = np.concatenate([offer.leaf_sum for offer in offers])
    return float(np.cumsum(sums * np.exp(maxima - top))[-1])


def _kept(scores: Float64, want: Want, offers: Sequence[Offer]) -> int | None:
    """How many candidates, best first, min_p and then top_p leave; at least one. None: they need more than there are.

    What scores above the worst candidate of every rank that holds some back is complete; what comes after it may not
    be. top_k needs no more than its k.
    """
    held_back = [offer.scores[-1] for offer in offers if offer.ids.size < offer.rows]
    floor = -np.inf if want.top_k else max(held_back, default=-np.inf)
    if want.min_p > 0:
        least = scores[0] + math.log(want.min_p)
        if floor >= least:
            return None
        scores = scores[: np.count_nonzero(scores >= least)]
    if want.top_p == 1:
        return int(scores.size)
    cumulative = np.cumsum(np.exp(scores - scores[0]))  # sequential, in float64: one order for every split
    whole = whole_sum(offers, scores[0]) if want.needs_sum else cumulative[-1]
    needed = int(np.searchsorted(cumulative, want.top_p * whole)) + 1
    if want.needs_sum and floor > -np.inf and needed > np.count_nonzero(scores > floor):
        return None
    return min(needed, int(scores.size))
