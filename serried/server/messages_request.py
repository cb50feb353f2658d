"""A body of /v1/messages as a chat: Anthropic's blocks as messages, tools and sampling in the other words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from serried.server.errors import bad_request
from serried.server.protocol_chat import ChatRequest, FunctionDefinition, Tool
from serried.server.protocol_messages import CountRequest, MessagesRequest

# Names of fields in errors, where the two interfaces differ.
RENAMED = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.schema": "output_config.format.schema",
    "response_format.type": "output_config.format.type",
}


def as_chat(body: CountRequest, switches: Sequence[str]) -> ChatRequest:
    """The chat that it is. switches: names of template variables that turn reasoning on and off."""
    choice, one_call = _tool_choice(body.tool_choice)
    thinks = (body.thinking or {}).get("type") in ("enabled", "adaptive")
    chat: dict[str, Any] = {
        "messages": _messages(body),
        "tools": _tools(body.tools or []),
        "tool_choice": choice,
        "parallel_tool_calls": False if one_call else None,
        "continue_final_message": body.messages[-1].get("role") == "assistant",
        # As with Anthropic, only who asks for it gets reasoning.
        "chat_template_kwargs": dict.fromkeys(switches, thinks),
    }
    if isinstance(body, MessagesRequest):
        chat |= {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        chat |= {"stop": body.stop_sequences, "response_format": (body.output_config or {}).get("format")}
    return ChatRequest.model_validate(chat)


def _messages(body: CountRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _texts(body.system, "system")})
    if not body.messages:
        raise bad_request("messages: empty; give at least one message", "messages")
    for number, message in enumerate(body.messages):
        where = f"messages[{number}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise bad_request(f"{where}.role: must be user or assistant", f"{where}.role")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif isinstance(content, list) and content:
            make = _user if role == "user" else _assistant
            messages += make(content, f"{where}.content")
        else:
            raise bad_request(f"{where}.content: must be a string or a list of blocks", f"{where}.content")
    return messages


def _user(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before the user's text."""
    results, texts = [], []
    for number, block in enumerate(blocks):
        at = f"{where}[{number}]"
        if _kind(block, at) == "tool_result":
            content = _texts(block.get("content", ""), f"{at}.content")
            if block.get("is_error"):
                content = f"Error: {content}"
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        else:
            texts.append(_text(block, at))
    said = [{"role": "user", "content": "\n".join(texts)}] if texts else []
    return results + said


def _assistant(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    texts, calls = [], []
    for number, block in enumerate(blocks):
        at = f"{where}[{number}]"
        match _kind(block, at):
            case "tool_use":
                if not isinstance(block.get("input"), dict):
                    raise bad_request(f"{at}.input: must be an object", f"{at}.input")
                function = {"name": block.get("name"), "arguments": json.dumps(block["input"], ensure_ascii=False)}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "thinking" | "redacted_thinking":
                pass  # templates leave out the reasoning of earlier turns
            case _:
                texts.append(_text(block, at))
    return [{"role": "assistant", "content": "".join(texts), **({"tool_calls": calls} if calls else {})}]


def _texts(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}: must be a string or a list of text blocks", where)
    return "\n".join(_text(block, f"{where}[{number}]") for number, block in enumerate(content))


def _text(block: Any, where: str) -> str:
    if _kind(block, where) != "text" or not isinstance(block.get("text"), str):
        raise bad_request(f"{where}: {str(block.get('type'))[:100]!r} is not supported: only text is", where)
    text: str = block["text"]
    return text


def _kind(block: Any, where: str) -> Any:
    if not isinstance(block, Mapping):
        raise bad_request(f"{where}: must be an object with a type", where)
    return block.get("type")


def _tools(tools: list[dict[str, Any]]) -> list[Tool] | None:
    made = []
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if tool.get("type", "custom") not in ("custom", None):
            raise bad_request(f"{where}.type: {str(tool['type'])[:100]!r} is not supported", f"{where}.type")
        name, about, schema = tool.get("name"), tool.get("description"), tool.get("input_schema")
        if not isinstance(name, str):
            raise bad_request(f"{where}.name: must be a string", f"{where}.name")
        if not isinstance(schema, dict):
            raise bad_request(f"{where}.input_schema: must be a JSON schema, an object", f"{where}.input_schema")
        if about is not None and not isinstance(about, str):
            raise bad_request(f"{where}.description: must be a string", f"{where}.description")
        function = FunctionDefinition(name=name, description=about, parameters=schema)
        made.append(Tool(type="function", function=function))
    return made or None


def _tool_choice(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    """OpenAI's choice, and whether there may be but one call."""
    if choice is None:
        return None, False
    one = choice.get("disable_parallel_tool_use") is True
    match choice.get("type"):
        case "auto" | "none" as same:
            return str(same), one
        case "any":
            return "required", one
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}, one
    raise bad_request("tool_choice.type: must be auto, any, tool or none", "tool_choice.type")
