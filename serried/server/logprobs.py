"""Log-probabilities in the shapes of OpenAI's two interfaces, and of vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serried.engine.interface import TokenLogprobs
from serried.text.tokenizer import Tokenizer

_LOWEST = -9999.0  # JSON has no infinity


def token_text(token: int, tokenizer: Tokenizer | None) -> str:
    """A token as text; as OpenAI writes it where it is a part of a character, or where there is no tokenizer."""
    if tokenizer is None:
        return f"token_id:{token}"
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionLogprobs:
    """`logprobs` of a completion: four lists, an entry for each token."""

    def __init__(self, tokenizer: Tokenizer | None, top: int) -> None:
        self._tokenizer, self._top = tokenizer, top
        self.lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, token: int, scores: TokenLogprobs | None, offset: int) -> None:
        """A token with its scores; None for the first of a prompt."""
        lists = self.lists
        lists["tokens"].append(token_text(token, self._tokenizer))
        lists["text_offset"].append(offset)
        if scores is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        lists["token_logprobs"].append(_finite(scores.logprobs[0]))
        best = _best(scores, self._top)
        # The token's own comes along where it is not among the likeliest, as OpenAI does it.
        best.setdefault(scores.ids[0], scores.logprobs[0])
        # Two tokens can have one text; the likelier of them is the one that is told.
        by_text: dict[str, float] = {}
        for id, value in best.items():
            by_text.setdefault(token_text(id, self._tokenizer), _finite(value))
        lists["top_logprobs"].append(by_text)


def chat_logprobs(
    tokens: Sequence[int], scores: Sequence[TokenLogprobs], tokenizer: Tokenizer | None, top: int
) -> dict[str, Any]:
    """`logprobs` of a chat completion."""
    return {"content": [_chat_entry(token, each, tokenizer, top) for token, each in zip(tokens, scores, strict=True)]}


def _chat_entry(token: int, scores: TokenLogprobs, tokenizer: Tokenizer | None, top: int) -> dict[str, Any]:
    entry = _spelled(token, scores.logprobs[0], tokenizer)
    entry["top_logprobs"] = [_spelled(id, value, tokenizer) for id, value in _best(scores, top).items()]
    return entry


def _spelled(token: int, logprob: float, tokenizer: Tokenizer | None) -> dict[str, Any]:
    text = token_text(token, tokenizer)
    raw = text.encode() if tokenizer is None else tokenizer.token_bytes(token)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


def prompt_logprobs(
    scores: Sequence[TokenLogprobs | None], tokenizer: Tokenizer | None
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape: for each token of the prompt its own and the likeliest, by id; None for the first."""
    return [None if each is None else _by_id(each, tokenizer) for each in scores]


def _by_id(scores: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, dict[str, Any]]:
    return {
        str(id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(id, tokenizer)}
        for id, logprob, rank in zip(scores.ids, scores.logprobs, scores.ranks, strict=True)
    }


def _best(scores: TokenLogprobs, top: int) -> dict[int, float]:
    """The likeliest tokens, best first; the token's own entry stands first in the scores, wherever it ranks."""
    order = sorted(range(len(scores.ids)), key=lambda number: (scores.ranks[number], scores.ids[number]))
    return {scores.ids[number]: scores.logprobs[number] for number in order[:top]}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
