"""What a chat asks for, whichever interface it came by: messages, tools, format and sampling, made into Questions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from serried.engine.interface import GrammarSpec
from serried.server.answers import Question
from serried.server.errors import bad_request
from serried.server.prompts import decode_end, encode_messages
from serried.server.protocol_chat import ChatRequest, Tool
from serried.server.questions import make_questions
from serried.server.sampling import output_room, sampling_params
from serried.server.state import ServerState
from serried.server.structure import check_grammar, grammar_of
from serried.text.reasoning import CLOSE, OPEN, opens_reasoning
from serried.text.tools import ToolFormat

MAX_TOOLS = 256


@dataclass(frozen=True)
class Chat:
    """A chat ready to be asked.

    tool_format: how calls are read from the output (None: not at all). one_call: all calls but the first are left
    out. reasoning: whether it is split off. reasoning_open: the prompt has opened it.
    """

    question: Question
    tool_names: tuple[str, ...] = ()
    tool_format: ToolFormat | None = None
    one_call: bool = False
    reasoning: bool = False
    reasoning_open: bool = False


async def prepare_chat(state: ServerState, body: ChatRequest, request: Request) -> Chat:
    """Check and encode a chat; errors name the field."""
    if body.modalities not in (None, [], ["text"]):
        raise bad_request("modalities: only text is supported", "modalities")
    choice, named = _tool_choice(body)
    tools = template_tools(body.tools) if choice != "none" else []
    template_kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None and "reasoning_effort" in state.config.allowed_chat_template_kwargs:
        template_kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    prompt = await encode_messages(
        state,
        body.messages,
        tools=tools,
        template=body.chat_template,
        template_kwargs=template_kwargs,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=body.continue_final_message is True,
    )
    opened = state.has_reasoning and opens_reasoning(decode_end(state.need_tokenizer("a chat"), prompt))
    found = grammar_of(body)
    tool_format = _format(state, choice, tools, forced=choice in ("required", "named"))
    if tool_format is not None and found is not None:
        message = f"{found[1]}: cannot be combined with tools; set tool_choice to none, or leave it out"
        raise bad_request(message, found[1])
    if choice in ("required", "named") and tool_format is not None:
        offered = [tool for tool in tools if named is None or tool["function"]["name"] == named]
        found = _call_grammar(state, tool_format, offered, many=named is None and body.parallel_tool_calls is not False)
    spec = None
    if found is not None:
        tags = ("" if opened else OPEN, CLOSE) if state.has_reasoning else None
        spec = GrammarSpec(found[0].kind, found[0].text, tags)
        await check_grammar(state, spec, found[1])
    question = _question(
        state, body, request, prompt, spec, keeps_special=tool_format is not None and tool_format.keeps_special
    )
    return Chat(
        question,
        tuple(tool["function"]["name"] for tool in tools),
        tool_format,
        one_call=body.parallel_tool_calls is False or named is not None,
        reasoning=state.has_reasoning,
        reasoning_open=opened,
    )


def _question(
    state: ServerState,
    body: ChatRequest,
    request: Request,
    prompt: Sequence[int],
    spec: GrammarSpec | None,
    keeps_special: bool,
) -> Question:
    model, config = state.engine.model, state.config
    name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked is None and "max_tokens" in model.defaults:
        asked = min(int(model.defaults["max_tokens"]), max(1, model.max_model_len - len(prompt)))
    logprobs = _logprobs(body)
    room = output_room(asked, name, len(prompt), "messages", model, config)
    if keeps_special:
        body.skip_special_tokens = False
    params = sampling_params(body, model, config, max_tokens=room, logprobs=logprobs)
    return make_questions(request, body, [prompt], [params], spec)[0]


def _logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs: needs logprobs to be true", "top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs < 1 << 31:
        raise bad_request(f"top_logprobs: {body.top_logprobs} is not a whole number of at least 0", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _tool_choice(body: ChatRequest) -> tuple[str, str | None]:
    """`none`, `auto`, `required` or `named`, and the name."""
    given = body.tool_choice
    if given is None:
        return ("auto" if body.tools else "none"), None
    if isinstance(given, str):
        if given not in ("none", "auto", "required"):
            raise bad_request("tool_choice: must be none, auto, required, or name a function", "tool_choice")
        if given == "required" and not body.tools:
            raise bad_request("tool_choice: needs tools to choose from", "tool_choice")
        return (given if body.tools else "none"), None
    function = given.get("function") if given.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        message = 'tool_choice: must be {"type": "function", "function": {"name": ...}}'
        raise bad_request(message, "tool_choice")
    if name not in {tool.function.name for tool in body.tools or ()}:
        raise bad_request(f"tool_choice: no tool is named {name[:100]!r}", "tool_choice.function.name")
    return "named", name


def template_tools(given: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """The tools as templates expect them; a 400 names the one that is wrong."""
    tools = given or []
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools: {len(tools)} tools; at most {MAX_TOOLS} are allowed", "tools")
    for number, tool in enumerate(tools):
        if tool.type != "function":
            where = f"tools[{number}].type"
            raise bad_request(f"{where}: must be function, not {tool.type[:100]!r}", where)
        if not tool.function.name or len(tool.function.name) > 256:
            where = f"tools[{number}].function.name"
            raise bad_request(f"{where}: must have 1 to 256 characters", where)
    return [
        {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}
        for tool in tools
    ]


def _format(state: ServerState, choice: str, tools: Sequence[Any], forced: bool) -> ToolFormat | None:
    if not tools or choice == "none":
        return None
    if state.tools is None and forced:
        message = "tool_choice: this model's chat template teaches no calls that we can read; see --tool-call-parser"
        raise bad_request(message, "tool_choice")
    return state.tools


def _call_grammar(
    state: ServerState, tool_format: ToolFormat, tools: Sequence[dict[str, Any]], many: bool
) -> tuple[GrammarSpec, str]:
    functions = [{"name": tool["function"]["name"], "parameters": tool["function"].get("parameters")} for tool in tools]
    special = state.need_tokenizer("tool_choice").control_literals
    try:
        text = tool_format.grammar(functions, special, many)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"tools: not JSON: {error}", "tools") from None
    return GrammarSpec("lark", text), "tools"


def tool_json(value: Any) -> str:
    """A value as the text of a message: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
