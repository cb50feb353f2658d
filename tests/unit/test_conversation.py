"""Conversation: what stays when the context is full, and what is on record."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serried.errors import InputError
from serried.text.conversation import Conversation, Message, Turn


def encode(messages: Sequence[Message]) -> list[int]:
    """A token a character."""
    return [ord(c) for message in messages for c in message["content"]]


def said(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_a_prompt_has_everything_while_it_fits() -> None:
    chat = Conversation("S")
    chat.add(Turn("q1", "a1", "thought"))
    chat.add(Turn("q2", "a2"))
    ids, max_tokens, forgotten = chat.prompt("q3", encode, 100, 10)
    assert (said(ids), max_tokens, forgotten) == ("Sq1a1q2a2q3", 10, 0)


def test_the_oldest_turns_are_forgotten_whole() -> None:
    chat = Conversation("S", [Turn(f"q{i}", f"a{i}") for i in range(5)])
    ids, max_tokens, forgotten = chat.prompt("q9", encode, 20, 5)
    assert (said(ids), max_tokens, forgotten) == ("Sq2a2q3a3q4a4q9", 5, 2)
    chat.add(Turn("q9", "a9"))
    ids, _, forgotten = chat.prompt("qA", encode, 20, 5)
    assert (said(ids), forgotten, chat.forgotten) == ("Sq3a3q4a4q9a9qA", 1, 3)


def test_half_the_context_is_enough_for_an_answer() -> None:
    chat = Conversation(None, [Turn("q", "a")] * 5)
    ids, max_tokens, forgotten = chat.prompt("end", encode, 20, 1000)
    assert (said(ids), max_tokens, forgotten) == ("qaqaqaend", 11, 2)


def test_a_long_message_gets_what_room_there_is() -> None:
    chat = Conversation("S", [Turn("q", "a")])
    ids, max_tokens, forgotten = chat.prompt("x" * 17, encode, 20, 10)
    assert (len(ids), max_tokens, forgotten) == (18, 2, 1)


def test_a_message_that_cannot_fit() -> None:
    chat = Conversation("S", [Turn("q", "a")])
    with pytest.raises(InputError, match=r"20 tokens, and the context holds 20"):
        chat.prompt("x" * 19, encode, 20, 5)
    assert chat.forgotten == 0
    assert said(chat.prompt("r", encode, 20, 5).ids) == "Sqar"


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8),
    message=st.integers(0, 30),
    context=st.integers(2, 40),
    max_tokens=st.integers(1, 40),
)
def test_the_rule(lengths: list[tuple[int, int]], message: int, context: int, max_tokens: int) -> None:
    """No more is forgotten than must be, and prompt and answer never exceed the context."""
    turns = [Turn("q" * q, "a" * a) for q, a in lengths]
    chat = Conversation(None, turns)
    if message >= context:
        with pytest.raises(InputError):
            chat.prompt("m" * message, encode, context, max_tokens)
        return
    prompt = chat.prompt("m" * message, encode, context, max_tokens)
    assert said(prompt.ids) == "".join(t.message + t.answer for t in turns[prompt.forgotten :]) + "m" * message
    assert 1 <= prompt.max_tokens <= max_tokens
    assert len(prompt.ids) + prompt.max_tokens <= context
    if prompt.forgotten:
        one_more = turns[prompt.forgotten - 1]
        assert len(prompt.ids) + len(one_more.message + one_more.answer) + min(max_tokens, context // 2) > context


def test_clear_keeps_the_system_prompt() -> None:
    chat = Conversation("S", [Turn("q", "a")], forgotten=1)
    chat.clear()
    assert said(chat.prompt("r", encode, 20, 5).ids) == "Sr"


def test_the_record_has_all_turns_and_the_reasoning() -> None:
    chat = Conversation("S", [Turn("q1", "a1", "hm"), Turn("q2", "a2")], forgotten=1)
    assert chat.record() == {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "q1"},
            {"role": "assistant", "content": "a1", "reasoning_content": "hm"},
            {"role": "user", "content": "q2"},
            {"role": "assistant", "content": "a2"},
        ]
    }
    assert Conversation().record() == {"messages": []}
