"""Edits of logits: what is done to one row before a token is chosen. Pure: rank 0 writes them, each rank makes its own.

In vLLM's order: what is not allowed and what is banned goes to -inf, biases are added, then the repetition penalty
divides or multiplies, then the presence and frequency penalties are taken off. All in float32, an element at a time,
so the edited logits are the same bits on whichever rank they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from serried.sampling_params import SamplingParams

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

NO_IDS = np.empty(0, np.int32)
NO_VALUES = np.empty(0, np.float32)
EXTREME = 1e30  # repetition penalties beyond it, or below 1 / it, are taken for it: no logit overflows


class Edits(NamedTuple):
    """The edits of one row, sparse.

    banned: int32 ids. biased, biases: int32 ids, float32. seen, offsets: int32 ids of tokens seen before, and the
    float32 that is added to each after the repetition penalty. allowed: int32 words, bit i of word w for id 32 w + i;
    ids beyond are not allowed; no words: all are.
    """

    banned: Int32 = NO_IDS
    biased: Int32 = NO_IDS
    biases: Float32 = NO_VALUES
    seen: Int32 = NO_IDS
    offsets: Float32 = NO_VALUES
    allowed: Int32 = NO_IDS
    repetition: float = 1.0

    def pack(self) -> bytes:
        """int32: how many are banned, biased and seen, the bits of the repetition penalty, then the arrays."""
        sizes = np.array([self.banned.size, self.biased.size, self.seen.size], np.int32)
        parts = (sizes, np.float32(self.repetition), *self[:6])
        return b"".join([part.tobytes() for part in parts])

    @classmethod
    def unpack(cls, data: bytes) -> Edits:
        """The inverse of pack."""
        words = np.frombuffer(data, np.int32)
        banned, biased, seen = (int(size) for size in words[:3])
        parts = np.split(words[4:], np.cumsum([banned, biased, biased, seen, seen]))
        return cls(
            banned=parts[0],
            biased=parts[1],
            biases=parts[2].view(np.float32),
            seen=parts[3],
            offsets=parts[4].view(np.float32),
            allowed=parts[5],
            repetition=float(words.view(np.float32)[3]),
        )

    def apply(self, row: Float32, first: int) -> None:
        """Edit a rank's part of a row, the logits of the ids from `first` on, in place."""
        if self.allowed.size:
            bits = np.zeros(row.size, bool)
            known = np.unpackbits(self.allowed.view(np.uint8), bitorder="little")[first : first + row.size]
            bits[: known.size] = known
            row[~bits] = -np.inf
        own, _ = _within(row, first, self.banned)
        row[own] = -np.inf
        own, at = _within(row, first, self.biased)
        row[own] += self.biases[at]
        own, at = _within(row, first, self.seen)
        logits, penalty = row[own], np.float32(self.repetition)
        row[own] = np.where(logits > 0, logits / penalty, logits * penalty) + self.offsets[at]


def _both(mask: Int32, allowed: Int32) -> Int32:
    """Tokens of both masks; an empty second one allows all."""
    size = min(mask.size, allowed.size) if allowed.size else mask.size
    return mask[:size] & allowed[:size] if allowed.size else mask


def _within(row: Float32, first: int, ids: Int32) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The places in a row of the ids that it holds, and which ids those are."""
    places = ids.astype(np.int64) - first
    own = (places >= 0) & (places < row.size)
    return places[own], own


class LogitEditor:
    """One request's edits from step to step: it counts the output's tokens as they come, each once.

    ends: the tokens that min_tokens holds back. bad_words: sequences of token ids, of which the last is banned where
    the output ends with those before it.
    """

    def __init__(self, params: SamplingParams, ends: Sequence[int], bad_words: Sequence[Sequence[int]]) -> None:
        self._params = params
        self._ends = list(ends)
        self._banned = [word[0] for word in bad_words if len(word) == 1]
        self._sequences = [list(word) for word in bad_words if len(word) > 1]
        biases = params.logit_bias or {}
        self._biased = np.array(list(biases), np.int32)
        self._biases = np.array(list(biases.values()), np.float32)
        self._allowed = NO_IDS if params.allowed_token_ids is None else bitmask(params.allowed_token_ids)
        self._repetition = min(max(params.repetition_penalty, 1 / EXTREME), EXTREME)
        self._seen = _Counts()
        self._output = 0  # tokens of the output that have been counted

    def edits(self, prompt: Sequence[int], output: Sequence[int], mask: Int32 | None = None) -> Edits:
        """What is to be done before the token after `output` is chosen. The output only ever grows.

        mask: the tokens that a grammar allows.
        """
        p = self._params
        banned = self._banned + (self._ends if len(output) < p.min_tokens else [])
        banned += [s[-1] for s in self._sequences if list(output[1 - len(s) :]) == s[:-1]]
        seen, counts = self._count(prompt, output)
        offsets = -(p.frequency_penalty * counts + p.presence_penalty * (counts > 0))
        return Edits(
            np.array(banned, np.int32),
            self._biased,
            self._biases,
            seen,
            offsets.astype(np.float32),
            self._allowed if mask is None else _both(mask, self._allowed),
            self._repetition,
        )

    def _count(self, prompt: Sequence[int], output: Sequence[int]) -> tuple[Int32, Int32]:
        """The tokens that penalties concern, and how often the output holds each: 0 for those of the prompt alone."""
        p = self._params
        if p.repetition_penalty == 1 and p.presence_penalty == 0 and p.frequency_penalty == 0:
            return NO_IDS, NO_IDS
        if self._output == 0 and p.repetition_penalty != 1:
            for token in prompt:
                self._seen.add(token, 0)
        for token in output[self._output :]:
            self._seen.add(token, 1)
        self._output = len(output)
        return self._seen.arrays()


class _Counts:
    """Tokens and how often each was added, in arrays that grow: a step adds one, and copies nothing."""

    def __init__(self) -> None:
        self._place: dict[int, int] = {}
        self._table = np.zeros((2, 64), np.int32)  # ids, counts

    def add(self, token: int, count: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        self._table[0, place] = token
        self._table[1, place] += count

    def arrays(self) -> tuple[Int32, Int32]:
        ids, counts = self._table[:, : len(self._place)]
        return ids, counts


def bitmask(ids: Sequence[int]) -> Int32:
    """int32 words with a bit for each id, up to the last id that is set."""
    bits = np.zeros((max(ids) // 32 + 1) * 32, bool)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def nothing_left(params: SamplingParams, ends: Sequence[int], bad_words: Sequence[Sequence[int]], size: int) -> bool:
    """Whether bad words of one token, and min_tokens, ban every token that is allowed, in a vocabulary of `size`."""
    banned = {word[0] for word in bad_words if len(word) == 1}
    if params.min_tokens:
        banned.update(ends)
    if params.allowed_token_ids is not None:
        return banned.issuperset(params.allowed_token_ids)
    return len(banned) == size
