"""Chat templates: messages to one prompt, whose control tokens are the template's own and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from serried.errors import InputError
from serried.text.template_process import renderer
from serried.text.tokenizer import Tokenizer, check_text

_ZERO_WIDTH_SPACE: Final = "\u200b"

Messages = Sequence[Mapping[str, Any]]


def render(
    source: Tokenizer | str,
    messages: Messages,
    add_generation_prompt: bool = True,
    *,
    chat_template: str | None = None,
    **kwargs: Any,
) -> str:
    """The prompt that a template (or a tokenizer's own template) makes of messages; `kwargs` go to it too.

    Malformed messages, or a template that raises, runs too long or needs too much memory -> InputError.
    """
    template, variables = _inputs(source, messages, add_generation_prompt, chat_template, kwargs)
    return renderer.render(template, variables)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Messages,
    add_generation_prompt: bool = True,
    *,
    chat_template: str | None = None,
    **kwargs: Any,
) -> list[int]:
    """The ids of a rendered chat, in which special-token literals inside the messages stay text.

    Such a literal gets a private mark after its first character before the template sees it, so the
    template's own ones are those without; the marks are taken out before encoding. Should a template
    notice (it renders something else with marks than without), the mark is a zero-width space that stays.
    Errors as `render`.
    """
    template, variables = _inputs(tokenizer, messages, add_generation_prompt, chat_template, kwargs)
    literals = tuple(tokenizer.control_literals)
    haystack = template + json.dumps(variables, ensure_ascii=False)
    mark = next((chr(c) for c in range(0xF0000, 0xFFFFE) if chr(c) not in haystack), _ZERO_WIDTH_SPACE)
    own = {name: variables[name] for name in tokenizer.special_tokens.keys() - kwargs.keys()}
    marked = _marked(variables, literals, mark) | own
    plain = renderer.render(template, variables)
    if marked == variables:
        return tokenizer.encode(plain, add_special=False, parse_special=True)
    text = renderer.render(template, marked)
    if text.replace(mark, "") != plain:
        mark = _ZERO_WIDTH_SPACE
        text = renderer.render(template, _marked(variables, literals, mark) | own)
    return tokenizer.encode_parts(_parts(text, tokenizer.control_literals, mark))


def _inputs(
    source: Tokenizer | str,
    messages: Messages,
    add_generation_prompt: bool,
    chat_template: str | None,
    kwargs: dict[str, Any],
) -> tuple[str, dict[str, Any]]:
    own, special = (source, {}) if isinstance(source, str) else (source.chat_template, source.special_tokens)
    template = chat_template if chat_template is not None else own
    if template is None:
        raise InputError("this model has no chat template: give one, or give the prompt as plain text (--raw)")
    variables = {"tools": None, "documents": None, **special, **kwargs}
    variables |= {"messages": check_messages(messages), "add_generation_prompt": add_generation_prompt}
    try:
        # JSON types only: a template must not get hold of objects that have methods of their own.
        return template, json.loads(json.dumps(variables))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"what a chat template is given must be JSON values: {error}") from None


def read_template(path: str | Path | None) -> str | None:
    """A chat template from a file, None for none; unreadable -> InputError naming it."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InputError(f"--chat-template {path}: cannot be read: {reason}") from None


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as templates expect them: text parts joined by newlines, keys that are None left out.

    Anything but dicts with a string `role` and a `content` of text -> InputError naming the message.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InputError(f"messages must be a list of objects, not {type(messages).__name__}")
    checked = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise InputError(f"{where} must be an object with role and content, not {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise InputError(f"{where}.role must be a string, such as 'user'")
        clean = {str(key): value for key, value in message.items() if value is not None}
        if "content" in clean:
            clean["content"] = _content(clean["content"], f"{where}.content")
        elif "tool_calls" not in clean:
            raise InputError(f"{where}.content is missing")
        checked.append(clean)
    return checked


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return check_text(content, where)
    if not isinstance(content, Sequence):
        raise InputError(f"{where} must be a string or a list of text parts, not {type(content).__name__}")
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InputError(f'{where}[{number}] must be {{"type": "text", "text": "..."}}: only text is supported')
        texts.append(check_text(part["text"], f"{where}[{number}].text"))
    return "\n".join(texts)


@lru_cache(maxsize=8)
def _patterns(literals: tuple[str, ...]) -> tuple[re.Pattern[str], tuple[str, ...], tuple[str, ...]]:
    """Where a literal starts, and the proper beginnings and endings of all literals."""
    names = "|".join(re.escape(name) for name in sorted(literals, key=len, reverse=True))
    starts = re.compile(f"(?=(?:{names}))." if literals else "(?!)", re.DOTALL)
    heads = {name[:size] for name in literals for size in range(1, len(name))}
    tails = {name[-size:] for name in literals for size in range(1, len(name))}
    return starts, tuple(heads), tuple(tails)


def _marked(value: Any, literals: tuple[str, ...], mark: str, is_role: bool = False) -> Any:
    """A copy of JSON data with a mark in every literal, and where a string and the template could form one.

    The ends of a role stay as they are: some templates build their control tokens around it.
    """
    if isinstance(value, dict):
        return {
            _marked(key, literals, mark): _marked(item, literals, mark, is_role=key == "role")
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_marked(item, literals, mark) for item in value]
    if not isinstance(value, str):
        return value
    starts, heads, tails = _patterns(literals)
    value = starts.sub(lambda match: match[0] + mark, value)
    if is_role:
        return value
    body = value.strip()  # templates trim
    left, right = value[: len(value) - len(value.lstrip())], value[len(value.rstrip()) :] if body else ""
    return f"{left}{mark * body.startswith(tails)}{body}{mark * body.endswith(heads)}{right}"


def _parts(text: str, literals: Mapping[str, int], mark: str) -> list[str | int]:
    """A rendered chat as text without marks and ids of the control tokens that have none inside."""
    names = sorted(literals, key=len, reverse=True)
    # A mark cannot be inside one character; there it follows.
    escaped = [re.escape(name) + (f"(?!{mark})" if len(name) == 1 else "") for name in names]
    pieces = re.split(f"({'|'.join(escaped)})", text)
    kept = mark if mark == _ZERO_WIDTH_SPACE else ""
    return [literals[p] if i % 2 else p.replace(mark, kept) for i, p in enumerate(pieces)]
