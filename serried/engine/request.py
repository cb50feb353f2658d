"""Request: a prompt on its way through the engine. Pure state, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from serried.engine.edits import Int32, LogitEditor
from serried.kv.prefix import PrefixChain
from serried.sampling_params import SamplingParams

if TYPE_CHECKING:
    from serried.engine.interface import TokenLogprobs


class Grammar(Protocol):
    """Which tokens may follow: see text/structured.py."""

    def mask(self) -> Int32:
        """Which tokens may come next, as bits: int32 [vocabulary / 32]."""
        ...

    def accept(self, token: int) -> bool:
        """Take the token that was chosen."""
        ...


@dataclass(eq=False)
class Request:
    """One sequence; two are equal only if they are the same.

    sample: which of the `n` answers to its prompt it is. bad_words: as token ids. computed: how many of its tokens
    have K and V in the cache. blocks: the cache blocks that it holds, in order. prompt_logprobs: those that are there
    already, of the prompt's second token on. finish_reason: None while it runs; then `stop` (an end token, a stop
    token, a stop string), `length` or `abort`.
    grammar: what the output must match, as far as it has come.
    priority: lower ones come first. cache_salt: only requests with the same one share prefixes. may_reuse: whether a
    known prefix may be taken instead of computed. chain: the keys of its full blocks, which the scheduler makes.
    cached: how many of its tokens were in the cache when it was admitted last.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    eos_ids: frozenset[int] = frozenset()
    sample: int = 0
    bad_words: Sequence[Sequence[int]] = ()
    output: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    grammar: Grammar | None = None
    priority: int = 0
    cache_salt: str | None = None
    chain: PrefixChain = field(init=False, repr=False)
    may_reuse: bool = True
    cached: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def longest(self) -> int:
        """How many positions the cache must be able to hold: the last token is never fed back."""
        return len(self.prompt) + self.params.max_tokens - 1

    @property
    def scores_prompt(self) -> bool:
        """Whether this is the request that gives its prompt's log-probabilities: the first of its `n`."""
        return self.params.prompt_logprobs is not None and self.sample == 0

    @cached_property
    def editor(self) -> LogitEditor | None:
        """What edits the logits at its end; None where nothing does."""
        if not self.params.edits_logits and not self.bad_words and self.grammar is None:
            return None
        return LogitEditor(self.params, (*self.params.stop_token_ids, *self.eos_ids), self.bad_words)

    def tokens(self, start: int, stop: int) -> list[int]:
        """The tokens at positions [start, stop), of prompt and output together."""
        edge = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(0, start - edge) : max(0, stop - edge)]

    def advance(self, token: int) -> None:
        """Take a token, whatever it may end."""
        self.output.append(token)
        if self.grammar is not None:
            self.grammar.accept(token)

    def append(self, token: int) -> None:
        """Take the next token; an end token, a stop token or the length may finish the request."""
        self.advance(token)
        ends = self.params.stop_token_ids if self.params.ignore_eos else (*self.params.stop_token_ids, *self.eos_ids)
        if token in ends:
            self.finish_reason = "stop"
        elif len(self.output) >= self.params.max_tokens:
            self.finish_reason = "length"
