"""An answer's text as its tokens come: what a stop string, an end token and min_tokens make of it."""

from __future__ import annotations

from serried.sampling_params import SamplingParams
from serried.text.detokenizer import Detokenizer
from serried.text.tokenizer import Tokenizer


class AnswerText:
    """The text of one answer, until a stop string or the engine ends it. Without a tokenizer it stays empty."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self._params = params
        self._count = 0
        self._reader = Detokenizer(tokenizer, params.skip_special_tokens, tuple(params.stop)) if tokenizer else None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended it."""
        return self._reader.stopped if self._reader else None

    def take(self, token: int | None, finish_reason: str | None = None) -> str:
        """The text that is certain now. Not to be called again once `stopped`, or after a finish_reason.

        token: None where the answer ends without one. finish_reason: the engine's, with the last token.
        """
        reader, p = self._reader, self._params
        before, self._count = self._count, self._count + 1
        if reader is None:
            return ""
        # A token that ends the answer is not text of it (vLLM leaves it out too).
        ends = finish_reason == "stop" and not p.include_stop_str_in_output
        text = "" if ends or token is None else reader.add([token], search=before >= p.min_tokens)
        if finish_reason and reader.stopped is None:
            text += reader.finish()
        if reader.stopped is not None and p.include_stop_str_in_output:
            text += reader.stopped
        return text
