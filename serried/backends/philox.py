"""Philox4x32-10: random bits as a pure function of a key and a counter (Salmon et al., SC 2011)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Uint32 = npt.NDArray[np.uint32]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(key: int, counter: tuple[npt.NDArray[np.uint64], int, int, int]) -> Uint32:
    """Ten rounds of Philox4x32 for a 64-bit key and counters whose first word varies: uint32 [n, 4]."""
    c0 = counter[0] & _LOW
    c1, c2, c3 = (np.full_like(c0, word & 0xFFFFFFFF) for word in counter[1:])
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (p1 >> _32) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _32) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def pick_rows(
    logits: npt.NDArray[np.float32],
    first: int,
    temperatures: npt.NDArray[np.float64],
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """For each row the place of the largest logit / temperature + noise (0: of the largest logit), and that value."""
    places, scores = np.zeros(len(logits), np.int64), np.zeros(len(logits), np.float64)
    for row, values in enumerate(logits):
        noisy = values.astype(np.float64)
        if temperatures[row] > 0:
            ids = np.arange(first, first + values.size)
            noisy = noisy / temperatures[row] + gumbel_noise(int(seeds[row]), int(positions[row]), ids)
        places[row] = np.argmax(noisy)
        scores[row] = noisy[places[row]]
    return places, scores


def sample_seed(seed: int, sample: int) -> int:
    """The seed of one of the `n` answers to a prompt: that of the first is the request's own.

    So all noise is a function of (seed, sample, position, token id). The last word of the counter, which is 0 for
    every token, keeps these bits apart from theirs.
    """
    if sample == 0:
        return seed
    low, high, *_ = philox4x32(seed, (np.zeros(1, np.uint64), 0, sample, 1))[0].tolist()
    return int(high) << 32 | int(low)


def gumbel_noise(seed: int, position: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Gumbel noise of a request's token choice: a function of (seed, position, token id) alone.

    So a token's noise is the same whichever rank holds its row and whatever else is in the batch. Four token ids
    share a counter: id i takes word i % 4 of counter i // 4.
    """
    groups, inverse = np.unique(ids // 4, return_inverse=True)
    words = philox4x32(seed, (groups.astype(np.uint64), position, 0, 0))
    bits = words[inverse, ids % 4].astype(np.float64)
    uniform = (bits + 0.5) * 2.0**-32  # in (0, 1), never an end
    return -np.log(-np.log(uniform))
