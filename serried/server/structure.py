"""Which grammar a request asks for, and whether it can be enforced: before anything is generated."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from serried.engine.interface import GrammarSpec
from serried.errors import InputError
from serried.server.errors import bad_request
from serried.server.protocol_common import SamplingFields
from serried.server.state import ServerState

SECONDS = 10.0  # fuel ends a compilation long before, unless the machine is overwhelmed
_KNOWN = 256


def grammar_of(fields: SamplingFields) -> tuple[GrammarSpec, str] | None:
    """The grammar and the field that asks for it; a 400 where several do, or one is malformed."""
    found = [*_from_response_format(fields.response_format), *_from_vllm(fields)]
    if len(found) > 1:
        names = " and ".join(field for _, field in found)
        raise bad_request(f"{names}: only one of them can hold; give one", found[1][1])
    return found[0] if found else None


async def check_grammar(state: ServerState, spec: GrammarSpec, field: str) -> None:
    """Compile it as the engine will; a 400 that names the field where that fails."""
    known = state.known_grammars
    if spec in known:
        return
    vocabulary = await state.grammars()
    try:
        async with state.compiling:
            await asyncio.wait_for(asyncio.to_thread(vocabulary.compile, spec), SECONDS)
    except InputError as error:
        raise bad_request(f"{field}: {error}", field) from None
    except TimeoutError:
        raise bad_request(f"{field}: this grammar takes longer than {SECONDS:g} s to compile", field) from None
    if len(known) >= _KNOWN:
        known.pop(next(iter(known)))
    known[spec] = None


def _from_response_format(given: dict[str, Any] | None) -> list[tuple[GrammarSpec, str]]:
    if given is None or given.get("type") == "text":
        return []
    kind = given.get("type")
    if kind == "json_object":
        return [(GrammarSpec("json_object", ""), "response_format")]
    if kind == "json_schema":
        # The Responses API has the schema one level higher.
        holder = given.get("json_schema", given)
        schema = holder.get("schema") if isinstance(holder, dict) else None
        field = "response_format.json_schema.schema" if "json_schema" in given else "response_format.schema"
        if not isinstance(schema, dict):
            raise bad_request(f"{field}: must be a JSON schema, an object", field)
        return [(GrammarSpec("json_schema", _text(schema, field)), field)]
    if kind == "regex":
        name = next((name for name in ("regex", "pattern", "value") if name in given), "regex")
        field = f"response_format.{name}"
        if not isinstance(given.get(name), str):
            raise bad_request(f"{field}: must be a string", field)
        return [(GrammarSpec("regex", given[name]), field)]
    message = "response_format.type: must be text, json_object, json_schema or regex"
    raise bad_request(message, "response_format.type")


def _from_vllm(fields: SamplingFields) -> list[tuple[GrammarSpec, str]]:
    """structured_outputs, and the older guided_json, guided_regex, guided_choice."""
    found: list[tuple[GrammarSpec, str]] = []
    wanted = fields.structured_outputs
    if wanted is not None:
        found += _named(wanted.json_, wanted.regex, wanted.choice, "structured_outputs.")
        if wanted.json_object:
            found.append((GrammarSpec("json_object", ""), "structured_outputs.json_object"))
        if len(found) != 1:
            message = "structured_outputs: give exactly one of json, regex, choice, json_object"
            raise bad_request(message, "structured_outputs")
    return found + _named(fields.guided_json, fields.guided_regex, fields.guided_choice, "guided_")


def _named(
    schema: dict[str, Any] | str | None, regex: str | None, choice: list[str] | None, prefix: str
) -> list[tuple[GrammarSpec, str]]:
    found = []
    if schema is not None:
        found.append((GrammarSpec("json_schema", _text(schema, f"{prefix}json")), f"{prefix}json"))
    if regex is not None:
        found.append((GrammarSpec("regex", regex), f"{prefix}regex"))
    if choice is not None:
        found.append((GrammarSpec("choice", json.dumps(choice)), f"{prefix}choice"))
    return found


def _text(schema: dict[str, Any] | str, field: str) -> str:
    """A schema as text, checked to be JSON."""
    try:
        return json.dumps(json.loads(schema) if isinstance(schema, str) else schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{field}: not JSON: {error}", field) from None
