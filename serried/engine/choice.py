"""One choice of tokens over all ranks: every rank offers, rank 0 decides, and asks for more where it must."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from serried.backends.base import Logits, Program
from serried.backends.picks import NO_TOKEN, gather_best
from serried.backends.survey import NOTHING
from serried.engine.edits import Edits
from serried.engine.sampler import Offer, decide, make_offer, pack_offers, unpack_offers
from serried.engine.wants import Want, columns
from serried.parallel.comm import Communicator

NO_OFFER = Offer(0, np.empty(0, np.int64), NOTHING, NOTHING, NOTHING)
MORE = 8  # times as many candidates in the next round


def choose_tokens(
    program: Program, own: Logits, first: int, wants: Sequence[Want], comm: Communicator
) -> list[int] | None:
    """The tokens of the rows that are to have one, on rank 0 (NO_TOKEN where none may be chosen); None on the others.

    own: float32 [Q, own vocabulary] that the program gave, of the ids from `first` on; it is left as it is where any
    row wants log-probabilities. One gather, and one more round (a word from rank 0, a gather) each time that more
    candidates are needed.
    """
    rows = [row for row, want in enumerate(wants) if want.samples]
    if not rows:
        return [] if comm.rank == 0 else None
    keep = any(want.logprobs >= 0 for want in wants)  # those are of the logits as they were
    wants = [wants[row] for row in rows]
    own = edited(own, first, rows, wants, keep)
    if all(want.single for want in wants):
        return _choose_single(program, own, first, wants, comm)
    tokens: list[int | None] = [None] * len(wants)
    open_rows, factor = list(range(len(wants))), 1
    while open_rows:
        asked = [wants[row] for row in open_rows]
        by_rank = gather_offers(make_offers(program, own, first, open_rows, asked, factor), comm)
        if by_rank is not None:
            for row, want, column in zip(open_rows, asked, zip(*by_rank, strict=True), strict=True):
                tokens[row] = decide(want, column, program.noise)
        if not any(want.open_ended for want in asked):
            break
        decided: Any = comm.broadcast(np.array([tokens[row] is not None for row in open_rows], np.int32))
        open_rows = [row for row, enough in zip(open_rows, decided, strict=True) if not enough]
        factor *= MORE
    return [token for token in tokens if token is not None] if comm.rank == 0 else None


def edited(own: Logits, first: int, rows: Sequence[int], wants: Sequence[Want], keep: bool) -> Logits:
    """Some rows of the logits with what their wants do to them; keep: in a copy, if anything is done."""
    edits = any(want.edits for want in wants)
    if len(rows) < len(own) or (edits and keep):
        own = own[list(rows)]
    for row, want in zip(own, wants, strict=True):
        if want.edits and row.size:
            Edits.unpack(want.edits).apply(row, first)
    return own


def _choose_single(
    program: Program, own: Logits, first: int, wants: Sequence[Want], comm: Communicator
) -> list[int] | None:
    """Where one candidate of each rank is enough, for all rows: two words a row and rank, in one gather."""
    if own.shape[1]:
        places, scores = program.pick(own, first, *columns(wants))
        return gather_best(places + first, scores, comm)
    # a rank without a part of the vocabulary
    return gather_best(np.full(len(wants), NO_TOKEN), np.full(len(wants), -np.inf), comm)


def make_offers(
    program: Program, own: Logits, first: int, rows: Sequence[int], wants: Sequence[Want], factor: int
) -> list[Offer]:
    """This rank's offers for some rows; where one candidate will do, the program picks it."""
    if own.shape[1] == 0:
        return [NO_OFFER] * len(wants)
    offers = [NO_OFFER] * len(wants)
    single = [i for i, want in enumerate(wants) if want.single]
    if single:
        places, scores = program.pick(own[[rows[i] for i in single]], first, *columns([wants[i] for i in single]))
        for at, i in enumerate(single):
            offers[i] = Offer(own.shape[1], places[at : at + 1] + first, scores[at : at + 1], NOTHING, NOTHING)
    others = [i for i, want in enumerate(wants) if not want.single]
    asked = [wants[i] for i in others]
    surveys = program.survey(
        own,
        [rows[i] for i in others],
        [want.candidates * factor for want in asked],
        [want.divisor for want in asked],
        [want.needs_sum for want in asked],
    )
    for i, survey in zip(others, surveys, strict=True):
        offers[i] = make_offer(own[rows[i]], first, wants[i], survey)
    return offers


def gather_offers(offers: Sequence[Offer], comm: Communicator) -> list[list[Offer]] | None:
    """The offers of all ranks, in rank order, on rank 0."""
    if comm.size == 1:
        return [list(offers)]
    flat = pack_offers(offers)
    sizes: Any = comm.all_gather(np.array([flat.size], np.int64), [1] * comm.size)
    parts = [int(size) for size in sizes]
    whole: Any = comm.gather(flat, parts)
    if whole is None:
        return None
    return [unpack_offers(part, len(offers)) for part in np.split(whole, np.cumsum(parts)[:-1])]
