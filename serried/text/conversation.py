"""Conversation: the turns of a chat, and which of them still fit into the model's context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from serried.errors import InputError

Message = dict[str, str]
Encode = Callable[[Sequence[Message]], list[int]]


class Turn(NamedTuple):
    """A message and its answer. The reasoning is kept for the record; no prompt has it."""

    message: str
    answer: str
    reasoning: str = ""


class Prompt(NamedTuple):
    """The token ids of a prompt, how many tokens its answer may have, how many turns were forgotten to make room."""

    ids: list[int]
    max_tokens: int
    forgotten: int


@dataclass
class Conversation:
    """A chat: the system prompt, the turns so far, and how many of the oldest the model no longer sees."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    forgotten: int = 0

    def prompt(self, message: str, encode: Encode, context: int, max_tokens: int) -> Prompt:
        """The prompt for the next message, at most `context` tokens with its answer.

        Where there is no room for an answer of `max_tokens` (or of half the context, if that is less), the oldest
        turns are forgotten, a message always with its answer. The system prompt and the new message stay; if not even
        they fit -> InputError.
        """
        room = context - min(max_tokens, context // 2)
        before = self.forgotten
        while len(ids := encode(self._messages(message))) > room and self.forgotten < len(self.turns):
            self.forgotten += 1
        if len(ids) >= context:
            self.forgotten = before
            raise InputError(
                f"the message is too long: with the system prompt it has {len(ids)} tokens, and the context holds "
                f"{context} (--max-model-len)"
            )
        return Prompt(ids, min(max_tokens, context - len(ids)), self.forgotten - before)

    def add(self, turn: Turn) -> None:
        """Enter a turn that has ended."""
        self.turns.append(turn)

    def clear(self) -> None:
        """Forget all turns, and keep the system prompt."""
        self.turns, self.forgotten = [], 0

    def record(self) -> dict[str, Any]:
        """Everything that was said, forgotten or not, as messages that a chat template or an API would take."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns:
            answer = {"role": "assistant", "content": turn.answer}
            if turn.reasoning:
                answer["reasoning_content"] = turn.reasoning
            messages += [{"role": "user", "content": turn.message}, answer]
        return {"messages": messages}

    def _messages(self, message: str) -> list[Message]:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns[self.forgotten :]:
            messages.append({"role": "user", "content": turn.message})
            messages.append({"role": "assistant", "content": turn.answer})
        return [*messages, {"role": "user", "content": message}]
