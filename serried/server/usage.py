"""Usage: how many tokens a request took and gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serried.server.answers import Piece


@dataclass
class Usage:
    """Counts of one request; prompt is known from the start, the rest grows with the pieces."""

    prompt: int
    completion: int = 0
    reasoning: int = 0
    cached: int = 0

    def take(self, piece: Piece) -> None:
        self.completion += len(piece.tokens)
        self.cached += piece.cached_tokens

    def to_dict(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": min(self.cached, self.prompt)},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }
