"""/tokenize and /detokenize."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from serried.server.body import JsonRoute
from serried.server.chat_request import template_tools
from serried.server.errors import bad_request
from serried.server.json_response import json_response
from serried.server.logprobs import token_text
from serried.server.prompts import check_length, encode_messages
from serried.server.protocol_tokens import DetokenizeRequest, TokenizeRequest
from serried.server.state import state_of

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a text, or of a chat."""
    state = state_of(request)
    state.check_model(body.model)
    tokenizer = state.need_tokenizer("/tokenize")
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt: give either prompt or messages", "prompt")
    if body.messages is not None:
        ids = await encode_messages(
            state,
            body.messages,
            tools=template_tools(body.tools),
            template=body.chat_template,
            template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt is not False,
        )
    else:
        check_length(state, body.prompt or "", "prompt")
        ids = await asyncio.to_thread(tokenizer.encode, body.prompt or "", body.add_special_tokens is not False)
    strings = [token_text(token, tokenizer) for token in ids] if body.return_token_strs else None
    limit = state.engine.model.max_model_len
    return json_response({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    state = state_of(request)
    state.check_model(body.model)
    tokenizer = state.need_tokenizer("/detokenize")
    size = state.engine.model.vocab_size
    wrong = next((token for token in body.tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise bad_request(f"tokens: token id {str(wrong)[:40]} is not in the vocabulary of {size}", "tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, False)
    return json_response({"prompt": text})
