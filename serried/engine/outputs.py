"""What a caller gets: answers, in the shape of vLLM's, and the pieces that they come in."""

from __future__ import annotations

from dataclasses import dataclass, field

from serried.engine.core import NewToken
from serried.engine.request import Request
from serried.text.detokenizer import Detokenizer
from serried.text.tokenizer import Tokenizer


@dataclass
class CompletionOutput:
    """One answer. text is empty where the model has no tokenizer.

    stop_reason: the stop string, or the token of stop_token_ids, that ended it.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class RequestOutput:
    """A prompt with its answer, in vLLM's shape: .outputs[0].text."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False


@dataclass(frozen=True)
class Delta:
    """A piece of an answer as it comes: new text (it may be empty), and the output so far."""

    index: int
    text: str
    output: RequestOutput


class Answer:
    """One request's answer as it grows: tokens in, text out, until a stop string or the engine ends it."""

    def __init__(self, index: int, request: Request, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.request = request
        self.completion = CompletionOutput()
        self.output = RequestOutput(str(request.id), prompt, request.prompt, [self.completion])
        self._text = Detokenizer(tokenizer, stop=tuple(request.params.stop)) if tokenizer else None

    def take(self, new: NewToken) -> Delta:
        """Take the request's next token."""
        done = self.completion
        done.token_ids.append(new.token)
        text = ""
        if self._text:
            # A token that ends the answer is not text of it (vLLM leaves it out too).
            text = "" if new.finish_reason == "stop" else self._text.add([new.token])
            if new.finish_reason and not self._text.stopped:
                text += self._text.finish()
        done.text += text
        if self._text and self._text.stopped:
            done.finish_reason, done.stop_reason = "stop", self._text.stopped
        elif new.finish_reason:
            done.finish_reason = new.finish_reason
            done.stop_reason = new.token if new.token in self.request.params.stop_token_ids else None
        self.output.finished = done.finish_reason is not None
        return Delta(self.index, text, self.output)
