"""What a serving benchmark asks: prompts, and when. The same for the same seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from serried.errors import InputError

KINDS = ("random", "shared-prefix")
# Short words that every tokenizer knows: about one token each.
WORDS = tuple(
    word
    for line in (
        "the of and to in is that it was for on are as with his they at be this from have or by one had not but what",
        "all were when we there can an your which their said if do will each about how up out them then she many some",
        "so these would other into has more her two like him see time could no make than first been its who now people",
        "my made over did down only way find use may water long little very after called just where most know",
    )
    for word in line.split()
)


@dataclass(frozen=True)
class Workload:
    """How many requests of which size come how fast.

    kind: `random`, or `shared-prefix`: the first `prefix_len` tokens of all prompts are the same. request_rate: of a
    Poisson process, requests a second; inf: all at once. vocab_size: prompts are token ids below it; None: text, of
    words that are about a token each.
    """

    requests: int
    input_len: int
    output_len: int
    kind: str = "random"
    prefix_len: int = 0
    request_rate: float = float("inf")
    vocab_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"--workload {self.kind}: unknown; choose from {', '.join(KINDS)}")
        for name in ("requests", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least 1")
        if not self.request_rate > 0:
            raise InputError(f"--request-rate {self.request_rate}: expected a number above 0, or inf")
        if not 0 <= self.prefix_len < self.input_len:
            raise InputError(f"--prefix-len {self.prefix_len}: expected less than --input-len {self.input_len}")

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, in the order in which they come."""
        rng = random.Random(self.seed)
        shared = self.prefix_len if self.kind == "shared-prefix" else 0
        if self.vocab_size is not None:
            # The first ids of a vocabulary are special; those above a thousand are rare.
            low, high = min(100, self.vocab_size - 1), min(1000, self.vocab_size)
            prefix = [rng.randrange(low, high) for _ in range(shared)]
            rest = self.input_len - shared
            return [prefix + [rng.randrange(low, high) for _ in range(rest)] for _ in range(self.requests)]
        words = [rng.choice(WORDS) for _ in range(shared)]
        return [
            " ".join(words + [rng.choice(WORDS) for _ in range(self.input_len - shared)]) for _ in range(self.requests)
        ]

    def arrivals(self) -> Iterator[float]:
        """When each request comes, in seconds from the first."""
        rng = random.Random(self.seed + 1)
        at = 0.0
        for _ in range(self.requests):
            yield at
            at += 0.0 if self.request_rate == float("inf") else rng.expovariate(self.request_rate)
