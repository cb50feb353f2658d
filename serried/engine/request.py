"""Request: a prompt on its way through the engine. Pure state, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from serried.sampling_params import SamplingParams


@dataclass
class Request:
    """One sequence.

    computed: how many of its tokens have K and V in the cache. blocks: the cache blocks that it holds, in order.
    finish_reason: None while it runs; then `stop` (an end token, a stop token, a stop string), `length` or `abort`.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    eos_ids: frozenset[int] = frozenset()
    output: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def longest(self) -> int:
        """How many positions the cache must be able to hold: the last token is never fed back."""
        return len(self.prompt) + self.params.max_tokens - 1

    def tokens(self, start: int, stop: int) -> list[int]:
        """The tokens at positions [start, stop), of prompt and output together."""
        edge = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(0, start - edge) : max(0, stop - edge)]

    def append(self, token: int) -> None:
        """Take the next token; an end token, a stop token or the length may finish the request."""
        self.output.append(token)
        ends = self.params.stop_token_ids if self.params.ignore_eos else (*self.params.stop_token_ids, *self.eos_ids)
        if token in ends:
            self.finish_reason = "stop"
        elif len(self.output) >= self.params.max_tokens:
            self.finish_reason = "length"
