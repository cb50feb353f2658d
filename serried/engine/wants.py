"""Want: what is wanted of one row of logits, in a form that travels to all ranks."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serried.backends.base import Float64, UInt64
from serried.backends.step import Int32
from serried.engine.request import Request

FIRST_CANDIDATES = 64  # that a rank offers where any number may be needed; choice.MORE times as many in the next round
_HEAD = struct.Struct("=dddQiiiii")  # 13 int32 words: temperature .. target in their order, bytes of the edits


@dataclass(frozen=True)
class Want:
    """How the token of one row is chosen, or which token's log-probability it gives.

    edits: packed Edits of the logits, nothing where there are none. logprobs: of how many likeliest tokens the
    log-probabilities are wanted, besides the row's own token's; -1 where none are. target: -1 where a token is to be
    chosen; else the row is a prompt's, and the token is the one that follows there.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    top_k: int = 0
    position: int = 0
    logprobs: int = -1
    target: int = -1
    edits: bytes = b""

    @classmethod
    def of(cls, request: Request) -> Want:
        """What a request's sampling parameters want of the logits at its end."""
        p = request.params
        editor, mask = request.editor, request.grammar.mask() if request.grammar else None
        return cls(
            temperature=p.temperature,
            top_p=p.top_p,
            min_p=p.min_p,
            seed=request.seed,
            top_k=max(p.top_k, 0),
            position=request.length,
            logprobs=-1 if p.logprobs is None else p.logprobs,
            edits=editor.edits(request.prompt, request.output, mask).pack() if editor else b"",
        )

    @classmethod
    def of_prompt(cls, request: Request, position: int) -> Want:
        """What a request wants of the logits at a position of its prompt: the log-probability of the next token."""
        return cls(logprobs=request.params.prompt_logprobs or 0, target=request.prompt[position + 1])

    @property
    def samples(self) -> bool:
        """Whether a token is to be chosen."""
        return self.target < 0

    @property
    def single(self) -> bool:
        """Whether one candidate of each rank is enough."""
        return self.temperature == 0 or (self.top_k == 0 and self.top_p == 1 and self.min_p == 0)

    @property
    def plain(self) -> bool:
        """Whether a token is all that is wanted, and one candidate of each rank, of the logits as they are, enough."""
        return self.single and self.samples and self.logprobs < 0 and not self.edits

    @property
    def open_ended(self) -> bool:
        """Whether more candidates may be needed than a rank offers at first."""
        return not self.single and self.top_k == 0

    @property
    def candidates(self) -> int:
        """How many candidates a rank offers at first."""
        return 1 if self.single else self.top_k or FIRST_CANDIDATES

    @property
    def needs_sum(self) -> bool:
        """Whether top_p is a part of the sum over the vocabulary, not of what top_k or min_p has left."""
        return self.open_ended and self.top_p < 1 and self.min_p == 0

    @property
    def divisor(self) -> float:
        """The temperature; a denormal one would give infinities."""
        return max(self.temperature, 1e-200) if self.temperature else 0.0


def pack_wants(wants: Sequence[Want]) -> Int32:
    """All in one array: of each the head, then its edits."""
    parts = []
    for w in wants:
        fields = w.temperature, w.top_p, w.min_p, w.seed, w.top_k, w.position, w.logprobs, w.target
        parts += [_HEAD.pack(*fields, len(w.edits)), w.edits]
    return np.frombuffer(b"".join(parts), np.int32)


def unpack_wants(flat: Int32) -> list[Want]:
    """The inverse of pack_wants."""
    data, at, wants = flat.tobytes(), 0, []
    while at < len(data):
        *fields, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        fields.append(data[at : at + size])
        at += size
        wants.append(Want(*fields))
    return wants


def columns(wants: Sequence[Want]) -> tuple[Float64, UInt64, npt.NDArray[np.int32]]:
    """Temperatures, seeds and positions, as a backend's `pick` takes them."""
    return (
        np.array([want.divisor for want in wants], np.float64),
        np.array([want.seed for want in wants], np.uint64),
        np.array([want.position for want in wants], np.int32),
    )
