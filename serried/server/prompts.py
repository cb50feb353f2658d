"""From what a request brings to token ids: text, ids, or messages. The slow parts run off the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from serried.server.errors import bad_request
from serried.server.state import ServerState
from serried.text.chat import encode_chat
from serried.text.tokenizer import Tokenizer

MAX_PROMPTS = 2048
_SMALL = 2000  # characters that are encoded in less time than it takes to ask a thread


async def encode_prompts(state: ServerState, prompt: Any, add_special: bool) -> list[list[int]]:
    """The ids of each prompt of a completion request; errors name the field."""
    many: Sequence[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if len(many) > MAX_PROMPTS:
        raise bad_request(f"prompt: {len(many)} prompts; at most {MAX_PROMPTS} are allowed", "prompt")
    if not many:
        raise bad_request("prompt: empty", "prompt")
    return [await _encode_one(state, each, add_special) for each in many]


async def _encode_one(state: ServerState, prompt: str | list[int], add_special: bool) -> list[int]:
    if isinstance(prompt, str):
        tokenizer = state.need_tokenizer("a prompt of text")
        check_length(state, prompt, "prompt")
        if len(prompt) <= _SMALL:
            ids = tokenizer.encode(prompt, add_special)
        else:
            ids = await asyncio.to_thread(tokenizer.encode, prompt, add_special)
    else:
        ids = prompt
        size = state.engine.model.vocab_size
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise bad_request(f"prompt: token id {wrong} is not in the vocabulary of {size}", "prompt")
    if not ids:
        raise bad_request("prompt: empty; give at least one token", "prompt")
    return ids


async def encode_messages(
    state: ServerState,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[int]:
    """The ids of a conversation, with the opening of the answer.

    continue_final_message: the last message is the beginning of the answer, which goes on from there.
    """
    tokenizer = state.need_tokenizer("a chat")
    if not messages:
        raise bad_request("messages: empty; give at least one message", "messages")
    if template is not None and not state.config.trust_request_chat_template:
        raise bad_request("chat_template: this server takes none from requests", "chat_template")
    chosen = template or state.chat_template
    if chosen is None:
        raise bad_request("this model has no chat template: start the server with --chat-template, or use completions")
    kwargs = dict(template_kwargs or {})
    for name in kwargs:
        if name not in state.config.allowed_chat_template_kwargs:
            allowed = ", ".join(state.config.allowed_chat_template_kwargs) or "none"
            message = f"chat_template_kwargs: {name[:100]!r} is not allowed here; allowed: {allowed}"
            raise bad_request(message, f"chat_template_kwargs.{name[:100]}")
    if tools:
        kwargs["tools"] = list(tools)
    prepared = [_prepared(message, number) for number, message in enumerate(messages)]
    begun = _beginning(prepared) if continue_final_message else ""
    check_length(state, json.dumps(prepared, ensure_ascii=False), "messages")
    opening = add_generation_prompt or continue_final_message
    ids = await asyncio.to_thread(encode_chat, tokenizer, prepared, opening, chat_template=chosen, **kwargs)
    if begun:
        ids += await asyncio.to_thread(tokenizer.encode, begun, False)
    if not ids:
        raise bad_request("messages: the chat template made an empty prompt of them", "messages")
    return ids


def _beginning(messages: list[dict[str, Any]]) -> str:
    """The text of the last message, which is taken off."""
    last, where = messages[-1], f"messages[{len(messages) - 1}]"
    content = last.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text")) for part in content)
    if last.get("role") != "assistant" or not isinstance(content, str) or last.get("tool_calls"):
        raise bad_request(f"{where}: must be the assistant's, and text, to be continued", where)
    if len(messages) == 1:
        raise bad_request(f"{where}: stands alone; there must be a message before the one that is continued", where)
    messages.pop()
    return content


def _prepared(message: Any, number: int) -> dict[str, Any]:
    """A message as templates expect it: the arguments of calls as objects, `developer` as `system`."""
    where = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise bad_request(f"{where}: must be an object with role and content", where)
    prepared = dict(message)
    if prepared.get("role") == "developer":
        prepared["role"] = "system"
    calls = prepared.get("tool_calls")
    if calls is None:
        return prepared
    if not isinstance(calls, list):
        raise bad_request(f"{where}.tool_calls: must be a list", f"{where}.tool_calls")
    if not calls:
        del prepared["tool_calls"]
        return prepared
    prepared["tool_calls"] = [_prepared_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return prepared


def _prepared_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where}.function: must be an object with name and arguments", f"{where}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        field = f"{where}.function.arguments"
        raise bad_request(f"{field}: must be a JSON object, written as a string", field)
    return {**call, "function": {**function, "arguments": arguments}}


def check_length(state: ServerState, text: str, field: str) -> None:
    """Refuse a text that cannot fit into the context before it is encoded: no token has more bytes than the longest."""
    tokenizer = state.tokenizer
    if tokenizer is None:
        return
    limit = state.engine.model.max_model_len
    if len(text) > limit * 4 and len(text) > limit * longest_token(tokenizer):
        message = f"{field}: {len(text)} characters are more than the context of {limit} tokens can hold"
        raise bad_request(message, field, "context_length_exceeded")


@lru_cache(maxsize=4)
def longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token; a normalizer may shorten text by as much again."""
    return 2 * max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))


def decode_end(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The last few characters of a prompt, control tokens included."""
    return tokenizer.decode(ids[-16:], skip_special=False)
