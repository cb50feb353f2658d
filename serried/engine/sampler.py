"""The choice of the next token. Each rank offers candidates of its own part of the vocabulary; rank 0 decides.

Greedy: the maximum. Temperature alone: Gumbel-max (the argmax of logit / temperature + noise is a draw from the
softmax), so again a rank offers one candidate. top_k: each rank offers its best k. top_p: candidates, and the
vocabulary's log-sum-exp by leaves of 64 rows, which no edge between ranks cuts. Noise is a function of the request's
seed, the position and the token id alone, and ties go to the lowest id: so a seeded request gives the same tokens in
any batch and under any split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serried.backends.philox import gumbel_noise, pick_rows
from serried.engine.request import Request

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]

LEAF = 64  # vocabulary rows
FIRST_CANDIDATES = 64  # that a rank offers for top_p; four times as many where they were too few
RECORD = 8  # int32 words of a packed Want


@dataclass(frozen=True)
class Want:
    """How the token of one row of logits is chosen, in a form that travels to all ranks."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    position: int

    @classmethod
    def of(cls, request: Request) -> Want:
        """What a request's sampling parameters want of the logits at its end."""
        p = request.params
        return cls(p.temperature, max(p.top_k, 0), p.top_p, request.seed, request.length)

    @property
    def single(self) -> bool:
        """Whether one candidate of each rank is enough."""
        return self.temperature == 0 or (self.top_k == 0 and self.top_p == 1)

    @property
    def candidates(self) -> int:
        """How many candidates a rank offers at first."""
        return 1 if self.single else self.top_k or FIRST_CANDIDATES

    @property
    def divisor(self) -> float:
        """The temperature; a denormal one would give infinities."""
        return max(self.temperature, 1e-200) if self.temperature else 0.0


@dataclass(frozen=True)
class Offer:
    """One rank's candidates for one row, best first: ids, and logit / temperature (or that plus noise).

    rows: how many ids the rank holds.
    leaf_max, leaf_sum: for top_p, of each leaf of 64 rows the maximum, and the sum of exp(x - maximum).
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


def pack_wants(wants: Sequence[Want]) -> npt.NDArray[np.int32]:
    """RECORD words a want: two float64 bit patterns, seed, top_k, position."""
    table = np.zeros((len(wants), RECORD // 2), np.int64)
    for row, want in zip(table, wants, strict=True):
        row[0] = np.float64(want.temperature).view(np.int64)
        row[1] = np.float64(want.top_p).view(np.int64)
        row[2] = np.uint64(want.seed).view(np.int64)
        row[3] = want.position << 32 | want.top_k
    return table.reshape(-1).view(np.int32)


def unpack_wants(flat: npt.NDArray[np.int32]) -> list[Want]:
    """The inverse of pack_wants."""
    table = np.ascontiguousarray(flat).view(np.int64).reshape(-1, RECORD // 2)
    return [
        Want(
            temperature=float(row[0].view(np.float64)),
            top_p=float(row[1].view(np.float64)),
            seed=int(row[2].view(np.uint64)),
            top_k=int(row[3] & 0xFFFFFFFF),
            position=int(row[3] >> 32),
        )
        for row in table
    ]


def columns(wants: Sequence[Want]) -> tuple[Float64, npt.NDArray[np.uint64], npt.NDArray[np.int32]]:
    """Temperatures, seeds and positions, as a backend's `pick` takes them."""
    return (
        np.array([want.divisor for want in wants], np.float64),
        np.array([want.seed for want in wants], np.uint64),
        np.array([want.position for want in wants], np.int32),
    )


def make_offer(logits: Logits, first: int, want: Want, count: int) -> Offer:
    """A rank's offer for one row: float32 logits of the ids from `first` on, at most `count` candidates."""
    nothing = np.empty(0, np.float64)
    if logits.size == 0:
        return Offer(0, np.empty(0, np.int64), nothing, nothing, nothing)
    if want.single:
        places, scores = pick_rows(logits[None], first, *columns([want]))
        return Offer(logits.size, places + first, scores, nothing, nothing)
    scaled = logits.astype(np.float64) / want.divisor
    at = best(scaled, count)
    leaves = _leaf_sums(scaled) if want.top_p < 1 and want.top_k == 0 else (nothing, nothing)
    return Offer(logits.size, at + first, scaled[at], *leaves)


def decide(want: Want, offers: Sequence[Offer]) -> int | None:
    """The token, from the offers of all ranks in rank order; None where top_p needs more candidates."""
    ids = np.concatenate([offer.ids for offer in offers])
    scores = np.concatenate([offer.scores for offer in offers])
    order = np.lexsort((ids, -scores))
    ids, scores = ids[order], scores[order]
    if want.single:
        return int(ids[0])
    if want.top_k:
        ids, scores = ids[: want.top_k], scores[: want.top_k]
    if want.top_p < 1:
        kept = _nucleus(scores, want, offers)
        if kept is None:
            return None
        ids, scores = ids[:kept], scores[:kept]
    noisy = scores + gumbel_noise(want.seed, want.position, ids)
    return int(ids[noisy == noisy.max()].min())


def best(scores: Float64, count: int) -> Int64:
    """The places of the `count` largest scores, in the order (score down, place up)."""
    if count < scores.size:
        places = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    else:
        places = np.arange(scores.size)
    return places[np.lexsort((places, -scores[places]))][:count]


def _leaf_sums(scaled: Float64) -> tuple[Float64, Float64]:
    padded = np.full(-(-scaled.size // LEAF) * LEAF, -np.inf)
    padded[: scaled.size] = scaled
    leaves = padded.reshape(-1, LEAF)
    maxima = leaves.max(axis=1)
    return maxima, np.exp(leaves - maxima[:, None]).sum(axis=1)


def _nucleus(scores: Float64, want: Want, offers: Sequence[Offer]) -> int | None:
    """How many candidates, best first, it takes to reach top_p; at least one. None: more than there are.

    The whole is the sum over the candidates where top_k has cut them, else over the vocabulary. What scores above the
    worst candidate of every rank that holds some back is complete; what comes after it may not be.
    """
    weights = np.exp(scores - scores[0])
    cumulative = np.cumsum(weights)  # sequential, in float64: one order for every split
    if want.top_k:
        return min(int(np.searchsorted(cumulative, want.top_p * cumulative[-1])) + 1, scores.size)
    maxima = np.concatenate([offer.leaf_max for offer in offers])
    sums = np.concatenate([offer.leaf_sum for offer in offers])
    whole = np.cumsum(sums * np.exp(maxima - scores[0]))[-1]
    needed = int(np.searchsorted(cumulative, want.top_p * whole)) + 1
    floor = max((offer.scores[-1] for offer in offers if offer.ids.size < offer.rows), default=-np.inf)
    if floor == -np.inf:  # nothing is held back
        return min(needed, scores.size)
    return needed if needed <= int(np.count_nonzero(scores > floor)) else None
