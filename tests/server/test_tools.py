"""Tool calls: each format read as it should be, and the same however the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serried.errors import InputError
from serried.text.tools import (
    FORMATS,
    CallArguments,
    CallStart,
    Content,
    Event,
    detect_format,
    joined,
    tool_format,
)

NAMES = ["get_weather", "add"]


def parse(name: str, *pieces: str) -> list[Event]:
    parser = tool_format(name).parser(NAMES)
    events = [event for piece in pieces for event in parser.add(piece)]
    return joined([*events, *parser.finish()])


def call(index: int, name: str, arguments: str) -> list[Event]:
    return [CallStart(index, name), CallArguments(index, arguments)]


WEATHER = '{"city": "Paris", "days": [1, {"a": "}"}]}'
ONE = f'{{"name": "get_weather", "arguments": {WEATHER}}}'
TWO = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
H, E = "<tool_call>", "</tool_call>"
T = "[TOOL_CALLS]"

CASES: list[tuple[str, str, list[Event]]] = [
    ("hermes", "Hello, world. ", [Content("Hello, world. ")]),
    ("hermes", f"{H}\n{ONE}\n{E}", call(0, "get_weather", WEATHER)),
    ("hermes", f"Let me see.\n\n{H}\n{ONE}\n{E}\n", [Content("Let me see."), *call(0, "get_weather", WEATHER)]),
    (
        "hermes",
        f"{H}{ONE}{E}\n{H}{TWO}{E}",
        [*call(0, "get_weather", WEATHER), *call(1, "add", '{"a": 1, "b": 2}')],
    ),
    ("hermes", f"{H}{ONE}{E} and so", [*call(0, "get_weather", WEATHER), Content(" and so")]),
    ("hermes", f"{H}{ONE}", call(0, "get_weather", WEATHER)),
    ("hermes", f"{H}{ONE}\n</tool", call(0, "get_weather", WEATHER)),
    ("hermes", f"{H}{ONE}\n{H}{TWO}", [*call(0, "get_weather", WEATHER), *call(1, "add", '{"a": 1, "b": 2}')]),
    ("hermes", f'{H}{{"name": "add"}}{E}', call(0, "add", "{}")),
    ("hermes", f'{H}{{"name": "add", "arguments": null}}{E}', call(0, "add", "{}")),
    ("hermes", f'{H}{{"arguments": {{"a": 1}}, "name": "add"}}{E}', call(0, "add", '{"a": 1}')),
    ("hermes", f'{H}{{"name": "add", "arguments": "{{\\"a\\": 1}}"}}{E}', call(0, "add", '{"a": 1}')),
    ("hermes", f'{H}{{"id": 7, "name": "a\\u0064d", "arguments": {{}}}}{E}', call(0, "add", "{}")),
    # What is cut off keeps what there is; what is no call stays text.
    ("hermes", f'{H}{{"name": "add", "arguments": {{"a": 1', call(0, "add", '{"a": 1')),
    ("hermes", f'see {H}{{"name": "ad', [Content(f'see {H}{{"name": "ad')]),
    ("hermes", f"{H} nothing {E}", [Content(f"{H} nothing {E}")]),
    ("hermes", f'a {H}{{"name": 5, "arguments": {{}}}}{E}', [Content(f'a {H}{{"name": 5, "arguments": {{}}}}{E}')]),
    ("hermes", "a <tool", [Content("a <tool")]),
    ("hermes", "a <tool_cash> b", [Content("a <tool_cash> b")]),
    ("llama3_json", "Hello {x}", [Content("Hello {x}")]),
    ("llama3_json", LLAMA, call(0, "get_weather", '{"city": "Paris"}')),
    ("llama3_json", f"<|python_tag|> {LLAMA}", call(0, "get_weather", '{"city": "Paris"}')),
    (
        "llama3_json",
        f'{LLAMA}; {{"type": "function", "name": "add", "parameters": {{}}}}\n',
        [*call(0, "get_weather", '{"city": "Paris"}'), *call(1, "add", "{}")],
    ),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', [Content('{"name": "Bob", "parameters": {}}')]),
    ("llama3_json", '{"name": "add", "age": 3}', [Content('{"name": "add", "age": 3}')]),
    ("llama3_json", '\n{"answer": [1, 2]} ', [Content('\n{"answer": [1, 2]} ')]),
    ("llama3_json", "<|python_tag|>print(1)", [Content("<|python_tag|>print(1)")]),
    ("llama3_json", f"{LLAMA} then", [*call(0, "get_weather", '{"city": "Paris"}'), Content(" then")]),
    ("mistral", "Hello [x]", [Content("Hello [x]")]),
    (
        "mistral",
        f"{T}[{ONE}, {TWO}]",
        [*call(0, "get_weather", WEATHER), *call(1, "add", '{"a": 1, "b": 2}')],
    ),
    ("mistral", f"I look. {T} [{TWO}]\n", [Content("I look."), *call(0, "add", '{"a": 1, "b": 2}')]),
    ("mistral", f"{T}{TWO}", call(0, "add", '{"a": 1, "b": 2}')),
    (
        "mistral",
        f'{T}get_weather[ARGS]{WEATHER}{T}add[CALL_ID]abc123XYZ[ARGS]{{"a": 1}}',
        [*call(0, "get_weather", WEATHER), *call(1, "add", '{"a": 1}')],
    ),
    ("mistral", f'{T}add{{"a": 1}}', call(0, "add", '{"a": 1}')),
    ("mistral", f"{T} I cannot {{", [Content(f"{T} I cannot {{")]),
    ("mistral", f"{T}[{{}}]", [Content(f"{T}[{{}}]")]),
    ("mistral", f'{T}[{{"name": "add", "arg', [Content(f'{T}[{{"name": "add", "arg')]),
]


@pytest.mark.parametrize(("name", "text", "events"), CASES)
def test_what_a_text_means(name: str, text: str, events: list[Event]) -> None:
    assert parse(name, text) == events
    assert parse(name, *text) == events


PARTS = [
    H, E, T, ONE, TWO, LLAMA, "<|python_tag|>", "add", "[ARGS]", "[", "]", "{", "}", '"', "\\", ":", ",", "; ",
    "\n", " ",     '"name"', '"arguments"', '"parameters"', "<", "</", "null", "1", "ü😀", "[TOOL", "text",
]  # fmt: skip


@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(PARTS), max_size=12), st.data())
def test_the_same_however_it_is_cut(name: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    whole = parse(name, text)
    assert parse(name, *pieces) == whole
    # Every call begins once, in order, and its arguments follow it.
    starts = [event.index for event in whole if isinstance(event, CallStart)]
    assert starts == list(range(len(starts)))
    if not starts:
        assert "".join(event.text for event in whole if isinstance(event, Content)) == text


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function=x>{% endif %}", None),
        ("{% if tools %}<|python_tag|>{% endif %}", "llama3_json"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ("<tool_call>", None),
    ],
)
def test_the_format_is_seen_in_the_template(template: str | None, name: str | None) -> None:
    assert detect_format(template) == name


def test_an_unknown_format_names_those_there_are() -> None:
    with pytest.raises(InputError, match="--tool-call-parser qwen: unknown; choose from auto, none, hermes"):
        tool_format("qwen")


def test_mistral_ids_have_nine_characters() -> None:
    ids = {tool_format("mistral").new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert tool_format("hermes").new_id().startswith("call_")


def test_arguments_are_json() -> None:
    (_, arguments) = parse("hermes", f"{H}{ONE}{E}")
    assert isinstance(arguments, CallArguments)
    assert json.loads(arguments.text)["city"] == "Paris"
