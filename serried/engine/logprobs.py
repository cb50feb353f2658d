"""Log-probabilities of tokens: over all ranks, of the model's own logits, before any edit.

A log-probability is a token's logit less the log-sum-exp of its row, both in float64 on rank 0. The sum is that of the
sampler: by leaves of 64 rows, added in their order. So it is the same bits under every split and in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from serried.backends.base import Int64, Logits, Program
from serried.engine.choice import NO_OFFER, gather_offers
from serried.engine.interface import TokenLogprobs
from serried.engine.sampler import Offer, make_offer, whole_sum
from serried.engine.wants import Want
from serried.parallel.comm import Communicator


def score_tokens(
    program: Program, own: Logits, first: int, wants: Sequence[Want], tokens: Sequence[int] | None, comm: Communicator
) -> list[TokenLogprobs] | None:
    """The log-probabilities of the rows that want them, on rank 0; None on the others.

    own: float32 [Q, own vocabulary], unedited. tokens: what rank 0 has chosen for the rows that sample.
    """
    rows = [row for row, want in enumerate(wants) if want.logprobs >= 0]
    if not rows:
        return None if tokens is None else []
    scored = _tokens_of(wants, rows, tokens, comm)
    values = _logits_of(own, first, rows, scored, comm)
    larger = np.array([np.count_nonzero(own[row] > value) for row, value in zip(rows, values, strict=True)], np.int64)
    larger_by_rank: Any = comm.gather(larger, [len(rows)] * comm.size)
    by_rank = gather_offers(_offers(program, own, first, rows, [wants[row].logprobs for row in rows]), comm)
    if by_rank is None:
        return None
    ranks = 1 + larger_by_rank.reshape(comm.size, len(rows)).sum(axis=0)
    columns = zip(*by_rank, strict=True)
    return [
        _combine(int(token), float(value), int(rank), wants[row].logprobs, offers)
        for row, token, value, rank, offers in zip(rows, scored, values, ranks, columns, strict=True)
    ]


def _tokens_of(wants: Sequence[Want], rows: Sequence[int], tokens: Sequence[int] | None, comm: Communicator) -> Int64:
    """The token of each row, on every rank: a prompt's own, or the one that rank 0 has chosen."""
    scored = np.array([wants[row].target for row in rows], np.int64)
    if tokens is not None:
        chosen = iter(tokens)
        every = [next(chosen) if want.samples else want.target for want in wants]
        scored = np.array([every[row] for row in rows], np.int64)
    whole: Int64 = comm.broadcast(scored)
    return whole


def _logits_of(own: Logits, first: int, rows: Sequence[int], tokens: Int64, comm: Communicator) -> Logits:
    """The logit of each row's token, on every rank: exactly one rank brings its bits, the others bring zeros."""
    places = tokens - first
    mine = np.flatnonzero((places >= 0) & (places < own.shape[1]))
    bits = np.zeros(tokens.size, np.int64)
    bits[mine] = own[np.array(rows)[mine], places[mine]].view(np.uint32)
    whole: Any = comm.all_gather(bits, [tokens.size] * comm.size)
    values: Logits = whole.reshape(comm.size, tokens.size).sum(axis=0).astype(np.uint32).view(np.float32)
    return values


def _offers(program: Program, own: Logits, first: int, rows: Sequence[int], counts: Sequence[int]) -> list[Offer]:
    """A rank's likeliest tokens of some rows with their logits, and the leaves of the log-sum-exp."""
    if own.shape[1] == 0:
        return [NO_OFFER] * len(rows)
    plain = Want(temperature=1.0)
    surveys = program.survey(own, rows, counts, [plain.divisor] * len(rows), [True] * len(rows))
    return [make_offer(own[row], first, plain, survey) for row, survey in zip(rows, surveys, strict=True)]


def _combine(token: int, logit: float, rank: int, count: int, offers: Sequence[Offer]) -> TokenLogprobs:
    top = max(offer.leaf_max.max(initial=-np.inf) for offer in offers)
    log_sum = top + np.log(whole_sum(offers, top))
    ids = np.concatenate([offer.ids for offer in offers])
    logits = np.concatenate([offer.scores for offer in offers])
    order = np.lexsort((ids, -logits))[:count]
    ids, logits = ids[order], logits[order]
    ranks = 1 + np.searchsorted(-logits, -logits)  # equal logits share a rank
    others = np.flatnonzero(ids != token)
    return TokenLogprobs(
        (token, *ids[others].tolist()),
        (float(logit - log_sum), *(logits[others] - log_sum).tolist()),
        (rank, *ranks[others].tolist()),
    )
