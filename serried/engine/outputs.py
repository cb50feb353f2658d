"""What a caller gets: answers, in the shape of vLLM's, and the pieces that they come in."""

from __future__ import annotations

from dataclasses import dataclass, field

from serried.engine.core import NewToken
from serried.engine.interface import TokenLogprobs
from serried.engine.request import Request
from serried.text.answer import AnswerText
from serried.text.tokenizer import Tokenizer

NOTHING_ALLOWED = "no token is allowed"


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability at one position, its rank there (1: the likeliest), and its text."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass
class CompletionOutput:
    """One answer. text is empty where the model has no tokenizer.

    index: which of the prompt's answers it is. logprobs: for each token, by id, its own and those of the likeliest;
    cumulative_logprob: the sum of its tokens' own; None where they were not asked for. finish_reason: `stop`, `length`
    or `abort`. stop_reason: the stop string, or the token of stop_token_ids, that ended it; or why it was aborted.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class RequestOutput:
    """A prompt with its answers, in vLLM's shape: .outputs[0].text.

    prompt_logprobs: for each token of the prompt what CompletionOutput.logprobs holds; None for the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(frozen=True)
class Delta:
    """A piece of an answer as it comes: new text (it may be empty), the answer so far, and its prompt's output.

    index: the prompt's.
    """

    index: int
    text: str
    completion: CompletionOutput
    output: RequestOutput


class Answer:
    """One request's answer as it grows: tokens in, text out, until a stop string or the engine ends it.

    It is added to the answers of `output`, that of its prompt.
    """

    def __init__(self, index: int, request: Request, output: RequestOutput, tokenizer: Tokenizer | None) -> None:
        p = request.params
        self.index = index
        self.request = request
        self.output = output
        self.completion = CompletionOutput(index=request.sample)
        if p.logprobs is not None:
            self.completion.logprobs, self.completion.cumulative_logprob = [], 0.0
        output.outputs.append(self.completion)
        self._tokenizer = tokenizer
        self._text = AnswerText(tokenizer, p)

    def take(self, new: NewToken) -> Delta:
        """Take the request's next token."""
        done, request = self.completion, self.request
        if request.scores_prompt and self.output.prompt_logprobs is None:
            self.output.prompt_logprobs = [None, *map(self._by_id, request.prompt_logprobs)]
        text = self._text.take(new.token, new.finish_reason)
        done.text += text
        if new.token is not None:
            done.token_ids.append(new.token)
            self._note(new.logprobs)
        done.finish_reason, done.stop_reason = self._end(new)
        self.output.finished = all(each.finish_reason for each in self.output.outputs)
        return Delta(self.index, text, done, self.output)

    def _end(self, new: NewToken) -> tuple[str | None, str | int | None]:
        """Whether the answer has ended, and what ended it."""
        if self._text.stopped is not None:
            return "stop", self._text.stopped
        if new.token is None:
            return new.finish_reason, NOTHING_ALLOWED
        ended_by_token = new.finish_reason is not None and new.token in self.request.params.stop_token_ids
        return new.finish_reason, new.token if ended_by_token else None

    def _note(self, logprobs: TokenLogprobs | None) -> None:
        done = self.completion
        if logprobs is not None and done.logprobs is not None and done.cumulative_logprob is not None:
            done.logprobs.append(self._by_id(logprobs))
            done.cumulative_logprob += logprobs.logprobs[0]

    def _by_id(self, scores: TokenLogprobs) -> dict[int, Logprob]:
        """As vLLM gives them: the token of the position first, then the likeliest."""
        return {
            id: Logprob(logprob, rank, self._spell(id))
            for id, logprob, rank in zip(scores.ids, scores.logprobs, scores.ranks, strict=True)
        }

    def _spell(self, token: int) -> str | None:
        return self._tokenizer.token_bytes(token).decode(errors="replace") if self._tokenizer else None
