"""One choice of tokens over all ranks: every rank offers, rank 0 decides, and asks for more where it must."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from serried.backends.base import Logits, Program
from serried.backends.picks import NO_TOKEN, gather_best
from serried.engine.edits import Edits
from serried.engine.sampler import NOTHING, Offer, decide, make_offer
from serried.engine.wants import Want, columns
from serried.parallel.comm import Communicator

MORE = 8  # times as many candidates in the next round


def choose_tokens(
    program: Program, own: Logits, first: int, wants: Sequence[Want], comm: Communicator
) -> list[int] | None:
    """The tokens of the rows that are to have one, on rank 0 (NO_TOKEN where none may be chosen); None on the others.

    own: float32 [Q, own vocabulary] that the program gave, of the ids from `first` on; it is left as it is. One
    gather, and one more round (a word from rank 0, a gather) each time that more candidates are needed.
    """
    rows = [row for row, want in enumerate(wants) if want.samples]
    if not rows:
        return [] if comm.rank == 0 else None
    wants = [wants[row] for row in rows]
    own = edited(own, first, rows, wants)
    if all(want.single for want in wants):
        return _choose_single(program, own, first, wants, comm)
    factor = 1
    while True:
        offers = make_offers(program, own, first, wants, factor)
        by_rank = gather_offers(offers, comm)
        tokens = None
        if by_rank is not None:
            tokens = [decide(want, column) for want, column in zip(wants, zip(*by_rank, strict=True), strict=True)]
        if not any(want.open_ended for want in wants):
            return _complete(tokens)
        enough = tokens is None or None not in tokens
        word: Any = comm.broadcast(np.array([enough], np.int32))
        if word[0]:
            return _complete(tokens)
        factor *= MORE


def edited(own: Logits, first: int, rows: Sequence[int], wants: Sequence[Want]) -> Logits:
    """Some rows of the logits with what their wants do to them: the logits themselves where nothing is done."""
    if len(rows) == len(own) and not any(want.edits for want in wants):
        return own
    copy = own[list(rows)]
    for row, want in zip(copy, wants, strict=True):
        if want.edits and row.size:
            Edits.unpack(want.edits).apply(row, first)
    return copy


def _choose_single(
    program: Program, own: Logits, first: int, wants: Sequence[Want], comm: Communicator
) -> list[int] | None:
    """Where one candidate of each rank is enough, for all rows: two words a row and rank, in one gather."""
    if own.shape[1]:
        places, scores = program.pick(own, first, *columns(wants))
        return gather_best(places + first, scores, comm)
    # a rank without a part of the vocabulary
    return gather_best(np.full(len(wants), NO_TOKEN), np.full(len(wants), -np.inf), comm)


def make_offers(program: Program, own: Logits, first: int, wants: Sequence[Want], factor: int) -> list[Offer]:
    """This rank's offers; where one candidate will do, the backend picks it, for all rows at once."""
    if own.shape[1] == 0 or not any(want.single for want in wants):
        return [make_offer(own[row], first, want, want.candidates * factor) for row, want in enumerate(wants)]
    places, scores = program.pick(own, first, *columns(wants))
    return [
        Offer(own.shape[1], places[row : row + 1] + first, scores[row : row + 1], NOTHING, NOTHING)
        if want.single
        else make_offer(own[row], first, want, want.candidates * factor)
        for row, want in enumerate(wants)
    ]


def gather_offers(offers: Sequence[Offer], comm: Communicator) -> list[list[Offer]] | None:
    """The offers of all ranks, in rank order, on rank 0."""
    flat = np.concatenate([offer.pack() for offer in offers]) if offers else np.empty(0, np.float64)
    if comm.size == 1:
        return [list(offers)]
    sizes: Any = comm.all_gather(np.array([flat.size], np.int64), [1] * comm.size)
    parts = [int(size) for size in sizes]
    # As int64: a Communicator moves bits, and float64 is none of its dtypes.
    whole: Any = comm.gather(flat.view(np.int64), parts)
    if whole is None:
        return None
    return [Offer.unpack_all(part.view(np.float64)) for part in np.split(whole, np.cumsum(parts)[:-1])]


def _complete(tokens: Sequence[int | None] | None) -> list[int] | None:
    return None if tokens is None else [token for token in tokens if token is not None]
