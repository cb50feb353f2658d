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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from serried.backends.base import Float64, Int64, Logits
from serried.backends.philox import gumbel_noise
from serried.backends.picks import NO_TOKEN
from serried.backends.survey import Survey
from serried.engine.wants import Want


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


Noise = Callable[[int, int, Int64], Float64]  # of a seed, a position and token ids: see philox.gumbel_noise


def pack_offers(offers: Sequence[Offer]) -> Int64:
    """All in one array of words, as they travel: three sizes of each, then all numbers of each."""
    sizes = [size for o in offers for size in (o.rows, o.ids.size, o.leaf_max.size)]
    parts = [part.view(np.int64) for o in offers for part in (o.ids, o.scores, o.leaf_max, o.leaf_sum)]
    return np.concatenate([np.array(sizes, np.int64), *parts])


def unpack_offers(flat: Int64, count: int) -> list[Offer]:
    """The inverse of pack_offers, for so many."""
    at, offers = 3 * count, []
    sizes = iter(flat[:at].tolist())

    def take(size: int) -> Int64:
        nonlocal at
        at += size
        return flat[at - size : at]

    for rows, candidates, leaves in zip(sizes, sizes, sizes, strict=True):
        ids, scores = take(candidates), take(candidates).view(np.float64)
        offers.append(Offer(rows, ids, scores, take(leaves).view(np.float64), take(leaves).view(np.float64)))
    return offers


def make_offer(logits: Logits, first: int, want: Want, survey: Survey) -> Offer:
    """A rank's offer for one row of more than one candidate: float32 logits of the ids from `first` on."""
    scores = logits[survey.places].astype(np.float64) / want.divisor
    return Offer(survey.possible, survey.places + first, scores, survey.leaf_max, survey.leaf_sum)


def decide(want: Want, offers: Sequence[Offer], noise: Noise = gumbel_noise) -> int | None:
    """The token (or NO_TOKEN), from the offers of all ranks in rank order; None where more candidates are needed."""
    ids = np.concatenate([offer.ids for offer in offers])
    scores = np.concatenate([offer.scores for offer in offers])
    order = np.argsort(-scores, kind="stable")  # equals stay in the order of ids, in which each rank's come
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
    noisy = scores + noise(want.seed, want.position, ids)
    return int(ids[noisy == noisy.max()].min())


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
