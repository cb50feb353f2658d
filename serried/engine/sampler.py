"""The choice of the next token, made by rank 0 alone. Ties go to the lowest token id."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from serried.engine.philox import gumbel_noise
from serried.engine.request import Request

Logits = npt.NDArray[np.float32]


def sample(logits: Logits, request: Request) -> int:
    """The token that follows `request`, from the float32 logits [vocabulary] of its last position.

    Greedy: the maximum. Otherwise Gumbel-max (argmax of logit / temperature + noise is a draw from the softmax) over
    the candidates that top_k and then top_p leave, with noise that depends on the request's seed, the position and
    the token id only: a seeded request gives the same tokens in any batch and under any split.
    """
    params = request.params
    if params.temperature == 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / max(params.temperature, 1e-200)  # a denormal would give infinities
    ids = np.arange(logits.size)
    if 0 < params.top_k < logits.size:
        ids = best(scaled, params.top_k)
    if params.top_p < 1:
        if ids.size == logits.size:
            ids = best(scaled, logits.size)
        ids = ids[: nucleus(scaled[ids], params.top_p)]
    noisy = scaled[ids] + gumbel_noise(request.seed, request.length, ids)
    winners = ids[noisy == noisy.max()]
    return int(winners.min())


def best(logits: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """The ids of the `count` largest logits, in the order (logit down, id up)."""
    if count < logits.size:
        threshold = np.partition(logits, -count)[-count]
        ids = np.flatnonzero(logits >= threshold)
    else:
        ids = np.arange(logits.size)
    return ids[np.lexsort((ids, -logits[ids]))][:count]


def nucleus(ordered: npt.NDArray[np.float64], top_p: float) -> int:
    """How many of the candidates, best first, it takes to reach a probability of top_p among them; at least one."""
    weights = np.exp(ordered - ordered[0])
    cumulative = np.cumsum(weights)  # sequential, in float64: one order for every split
    return min(int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1, ordered.size)
