"""A body of /v1/responses as a chat: the same messages, tools and format in the other interface's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from serried.server.errors import bad_request
from serried.server.protocol_chat import ChatRequest, Tool
from serried.server.protocol_common import SamplingFields
from serried.server.protocol_responses import ResponsesRequest

# Names of fields in errors, where the two interfaces differ.
RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.schema": "text.format.schema",
    "response_format.type": "text.format.type",
    "reasoning_effort": "reasoning.effort",
}
_TEXTS = ("input_text", "output_text", "text")


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The chat that it is; a 400 names the field that has no place there."""
    if (body.n or 1) != 1:
        raise bad_request("n: a response has one answer", "n")
    if body.truncation not in (None, "disabled"):
        raise bad_request("truncation: prompts are never truncated; shorten the input", "truncation")
    sampling = {name: getattr(body, name) for name in SamplingFields.model_fields}
    text_format = (body.text or {}).get("format")
    wants_logprobs = bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or ())
    return ChatRequest.model_validate(
        {
            **sampling,
            "messages": _messages(body),
            "max_completion_tokens": body.max_output_tokens,
            "tools": _tools(body.tools or []),
            "tool_choice": _tool_choice(body.tool_choice),
            "parallel_tool_calls": body.parallel_tool_calls,
            "response_format": text_format if text_format is not None else body.response_format,
            "reasoning_effort": (body.reasoning or {}).get("effort"),
            "logprobs": wants_logprobs or None,
            "top_logprobs": body.top_logprobs if wants_logprobs else None,
            "chat_template_kwargs": body.chat_template_kwargs,
        }
    )


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not body.input:
        raise bad_request("input: empty; give at least one item", "input")
    for number, item in enumerate(body.input):
        _add_item(messages, item, f"input[{number}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    match item.get("type", "message"):
        case "message":
            if not isinstance(item.get("role"), str):
                raise bad_request(f"{where}.role: must be user, assistant, system or developer", f"{where}.role")
            content = _text(item.get("content"), f"{where}.content")
            messages.append({"role": item["role"], "content": content})
        case "function_call":
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        case "function_call_output":
            output = _text(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        case "reasoning":
            pass  # templates leave out the reasoning of earlier turns
        case other:
            raise bad_request(f"{where}.type: {str(other)[:100]!r} is not supported", f"{where}.type")


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}: must be a string or a list of text parts", where)
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in _TEXTS or not isinstance(part.get("text"), str):
            raise bad_request(f"{where}[{number}]: only text is supported (input_text)", f"{where}[{number}]")
    return "".join(part["text"] for part in content)


def _tools(tools: list[dict[str, Any]]) -> list[Any] | None:
    """Flat function tools as the nested ones of a chat."""
    made = []
    for number, tool in enumerate(tools):
        if tool.get("type") != "function":
            where = f"tools[{number}].type"
            raise bad_request(f"{where}: only function tools are supported, not {str(tool.get('type'))[:100]!r}", where)
        function = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
        try:
            made.append(Tool.model_validate({"type": "function", "function": function}))
        except ValidationError as error:
            first = error.errors()[0]
            where = f"tools[{number}].{first['loc'][-1]}"
            raise bad_request(f"{where}: {first['msg']}", where) from None
    return made or None


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice
