"""From a request to Questions for the engine, and to their pieces under the queue's limit."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from fastapi import Request

from serried.engine.interface import GrammarSpec
from serried.sampling_params import SamplingParams
from serried.server.answers import Piece, Question, answer
from serried.server.errors import bad_request
from serried.server.protocol_common import SamplingFields
from serried.server.sse import merged
from serried.server.state import ServerState, cache_salt

MAX_SEQUENCES = 4096


def make_questions(
    request: Request,
    fields: SamplingFields,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    grammar: GrammarSpec | None,
) -> list[Question]:
    """A question for each prompt; a 400 where they ask for too many sequences at once."""
    total = sum(each.n for each in params)
    if total > MAX_SEQUENCES:
        raise bad_request(f"n: {total} answers in one request; at most {MAX_SEQUENCES} are allowed", "n")
    priority = fields.priority or 0
    if not -(1 << 31) <= priority < 1 << 31:
        raise bad_request(f"priority: {str(priority)[:40]} is not within 32 bits", "priority")
    salt = cache_salt(request, fields.cache_salt)
    return [
        Question(number, prompt, each, grammar, priority, salt)
        for number, (prompt, each) in enumerate(zip(prompts, params, strict=True))
    ]


async def pieces_of(state: ServerState, questions: Sequence[Question], arrived: float) -> AsyncGenerator[Piece, None]:
    """The pieces of all samples of all questions as they come. QueueFull comes before the first."""
    with state.admitted(sum(each.params.n for each in questions)):
        sources = merged([answer(state, each, arrived) for each in questions])
        try:
            async for piece in sources:
                yield piece
        finally:
            await sources.aclose()
