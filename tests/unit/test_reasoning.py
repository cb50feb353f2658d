"""ReasoningSplitter: however the text is cut, reasoning and answer are those of the whole."""

from __future__ import annotations

import re
from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serried.text.reasoning import ReasoningSplitter, opens_reasoning

WORDS = st.sampled_from(["<think>", "</think>", "<think", "</", "<", "think>", " ", "\n\n", "a", "b c", "</thin", "<>"])


def whole(text: str, opened: bool) -> tuple[str, str]:
    """Reasoning and answer of a text that is all there."""
    if not opened:
        found = re.match(r"\s*<think>", text)
        if found is None:
            return "", text
        text = text[found.end() :]
    reasoning, _, answer = text.partition("</think>")
    return reasoning.strip(), answer.lstrip()


def streamed(pieces: list[str], opened: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened)
    out = [piece for text in pieces for piece in splitter.add(text)] + splitter.finish()
    assert all(piece.text for piece in out)
    kinds = [kind for kind, _ in groupby(out, key=lambda piece: piece.is_reasoning)]
    assert kinds in ([], [True], [False], [True, False])
    reasoning, answer = ("".join(p.text for p in out if p.is_reasoning is kind) for kind in (True, False))
    return reasoning, answer


@settings(max_examples=400, deadline=None)
@given(words=st.lists(WORDS, max_size=12), opened=st.booleans(), cuts=st.lists(st.integers(0, 60), max_size=20))
def test_any_cut(words: list[str], opened: bool, cuts: list[int]) -> None:
    text = "".join(words)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert streamed([text[a:b] for a, b in pairwise(edges)], opened) == whole(text, opened)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "answer"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("\n<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("Hm, hm.\n</think>\nYes.", True, "Hm, hm.", "Yes."),
        ("Yes: <think>no</think>.", False, "", "Yes: <think>no</think>."),
        ("<think>one</think>two</think>", False, "one", "two</think>"),
        ("<think>cut sho", False, "cut sho", ""),
        ("<thi", False, "", "<thi"),
        ("  two spaces", False, "", "  two spaces"),
        ("", True, "", ""),
    ],
)
def test_by_character(text: str, opened: bool, reasoning: str, answer: str) -> None:
    assert streamed(list(text), opened) == (reasoning, answer)
    assert streamed([text], opened) == (reasoning, answer)


def test_what_is_certain_is_shown_at_once() -> None:
    splitter = ReasoningSplitter()
    assert splitter.add("<th") == []
    assert splitter.add("ink>\nI ") == [("I", True)]
    assert splitter.add("think </") == [(" think", True)]
    assert splitter.add("b>.") == [(" </b>.", True)]
    assert splitter.add("</think>\n") == []
    assert splitter.add("\nSo") == [("So", False)]
    assert splitter.add(" be it <think>") == [(" be it <think>", False)]


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [("<|im_start|>assistant\n<think>\n", True), ("<think>", True), ("<think>\n\n</think>\n\n", False), ("", False)],
)
def test_prompts_that_open_the_reasoning(prompt: str, opened: bool) -> None:
    assert opens_reasoning(prompt) is opened
