"""Grammars: whatever tokens are chosen among those allowed, the text matches; what cannot be enforced is refused."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import pytest
from fakes import EOS, tiny_tokenizer

from serried.engine.interface import GrammarSpec
from serried.errors import InputError
from serried.text.structured import GrammarVocabulary
from serried.text.tools import CallStart, tool_format

TOKENIZER = tiny_tokenizer()
SIZE = 410  # more than the tokenizer has
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@cache
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(TOKENIZER, SIZE, [EOS])


def walk(spec: GrammarSpec, seed: int, steps: int = 400) -> str | None:
    """The text of random tokens among those allowed; None where it has not ended after so many."""
    rng = random.Random(seed)
    grammar = vocabulary().compile(spec)
    tokens: list[int] = []
    for _ in range(steps):
        mask = grammar.mask()
        assert mask.shape == ((SIZE + 31) // 32,) and mask.dtype == "int32"
        allowed = [token for token in range(len(mask) * 32) if mask[token // 32] >> (token % 32) & 1]
        assert allowed and max(allowed) < TOKENIZER.vocab_size
        token = EOS if EOS in allowed and rng.random() < 0.5 else rng.choice(allowed)
        assert grammar.accept(token)
        if token == EOS:
            assert grammar.finished
            return TOKENIZER.decode(tokens)
        tokens.append(token)
    return None


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", "[a-c]{2,5}x?", r"[a-c]{2,5}x?"),
        ("regex", "(yes|no)/[0-9]{3}", r"(yes|no)/[0-9]{3}"),
        ("regex", "", ""),
        ("choice", '["red", "gr\\"een", "bl\\u00fc", "\\ud83d\\ude00", "a\\\\b\\nc"]', 'red|gr"een|blü|😀|a\\\\b\nc'),
    ],
)
def test_text_matches(kind: Any, text: str, pattern: str) -> None:
    for seed in range(10):
        said = walk(GrammarSpec(kind, text), seed)
        assert said is not None and re.fullmatch(pattern, said), said


def test_json_matches_its_schema() -> None:
    done = 0
    for seed in range(12):
        said = walk(GrammarSpec("json_schema", json.dumps(PERSON)), seed)
        if said is None:
            continue  # spaces may go on for ever
        done += 1
        value = json.loads(said)
        assert set(value) == {"name", "age", "tags"}
        assert isinstance(value["name"], str) and len(value["name"]) <= 8
        assert 0 <= value["age"] <= 150 and isinstance(value["age"], int)
        assert len(value["tags"]) <= 2 and set(value["tags"]) <= {"a", "b"}
    assert done > 3


def test_any_object() -> None:
    grammar = vocabulary().compile(GrammarSpec("json_object", ""))
    assert all(grammar.accept(token) for token in TOKENIZER.encode('{"a": [1, {"b": null}]}', add_special=False))
    assert grammar.finished
    assert not vocabulary().compile(GrammarSpec("json_object", "")).accept(TOKENIZER.encode("[", add_special=False)[0])


@pytest.mark.parametrize(
    ("reasoning", "text", "fits"),
    [
        (None, "ab", True),
        (None, "<think>x</think>ab", False),
        (("<think>", "</think>"), "ab", True),
        (("<think>", "</think>"), "<think>{ anything 1 }</think>\n\nab", True),
        (("<think>", "</think>"), "hm</think>ab", False),
        (("", "</think>"), "hm, ab\n</think>\n\nab", True),
        (("", "</think>"), "ab</think>c", False),
    ],
)
def test_reasoning_is_free(reasoning: tuple[str, str] | None, text: str, fits: bool) -> None:
    grammar = vocabulary().compile(GrammarSpec("regex", "ab", reasoning))
    accepted = all(grammar.accept(token) for token in TOKENIZER.encode(text, add_special=False))
    assert (accepted and grammar.finished) is fits


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
@pytest.mark.parametrize("many", [False, True])
def test_forced_calls_are_calls(name: str, many: bool) -> None:
    tools = [
        {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"c": {"enum": ["x", "y"]}}, "required": ["c"]},
        },
        {"name": "stop", "parameters": None},
    ]
    form = tool_format(name)
    spec = GrammarSpec("lark", form.grammar(tools, TOKENIZER.control_literals, many))
    grammar = vocabulary().compile(spec)
    key = "parameters" if name == "llama3_json" else "arguments"
    one = f'{{"name": "get_weather", "{key}": {{"c": "x"}}}}'
    marks = {"hermes": ("<tool_call>\n", "\n", "\n</tool_call>"), "mistral": ("[TOOL_CALLS][", ", ", "]")}
    start, between, end = marks.get(name, ("", "; ", ""))
    text = (
        start + one + (end + between + start if name == "hermes" else between) + one + end
        if many
        else start + one + end
    )
    assert all(grammar.accept(token) for token in TOKENIZER.encode(text, add_special=False, parse_special=True))
    assert grammar.mask()[0] >> EOS & 1
    parser = form.parser(["get_weather", "stop"])
    events = [*parser.add(text), *parser.finish()]
    assert [event.name for event in events if isinstance(event, CallStart)] == ["get_weather"] * (1 + many)


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", '{"not": {}}', "not"),
        ("json_schema", '{"$ref": "#"}', "no text matches"),
        ("json_schema", "[]", "must be an object"),
        ("json_schema", '{"type": "string", "enum": [1]}', "ncompatible|nsatisfiable"),
        ("json_schema", '{"type": "array", "contains": {"const": 1}}', "contains"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("regex", "(", "unclosed"),
        ("regex", "a\\", "half an escape"),
        ("regex", "\ud800", "surrogate"),
        ("choice", "[]", "at least one"),
        ("choice", "[5]", "at least one"),
        ("lark", "start: nothing", "nothing"),
        ("regex", "a" * 300_000, "at most"),
    ],
)
def test_what_cannot_be_enforced_is_refused(kind: Any, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        vocabulary().compile(GrammarSpec(kind, text))
    assert "\n" not in str(caught.value)


def test_a_token_that_does_not_fit_is_refused() -> None:
    grammar = vocabulary().compile(GrammarSpec("regex", "ab"))
    assert not grammar.accept(TOKENIZER.encode("b", add_special=False)[0])
