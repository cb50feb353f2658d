"""`serried generate`: answer prompts from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from serried.cli.options import add_engine_arguments, add_tp_argument, engine_options, integers
from serried.cli.sampling import add_sampling_arguments, sampling_params
from serried.cli.standard_input import read_text
from serried.cli.watch import Watch
from serried.engine.llm import LLM
from serried.engine.outputs import CompletionOutput, Delta, Logprob, RequestOutput
from serried.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    add_tp_argument(parser)
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="one answer each; - reads standard input")
    parser.add_argument(
        "--prompt-ids", type=integers("--prompt-ids"), action="append", help="a prompt as token ids: 1,2,3"
    )
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    if not args.json and (params.logprobs, params.prompt_logprobs) != (None, None):
        raise InputError("--logprobs, --prompt-logprobs: they stand in the JSON document; add --json")
    texts = [read_text() if prompt == "-" else prompt for prompt in args.prompts]
    if not texts and not args.prompt_ids:
        raise InputError("no prompt: give text, - for standard input, or --prompt-ids")
    with LLM(args.model, **engine_options(args)) as llm:
        prompts: list[Any] = [_encode(llm, text, args.raw) for text in texts] + (args.prompt_ids or [])
        if not llm.executor.decides:
            llm.generate(prompts, params)
            return 0
        watch = Watch(llm)
        shown = [*texts, *([None] * (len(prompts) - len(texts)))]
        outputs = _show(watch.over(llm.stream(prompts, params)), shown, args.json)
        if args.json:
            print(json.dumps(_document(outputs, watch)))
        else:
            print(watch.line(), file=sys.stderr)
    return 0


def _encode(llm: LLM, text: str, raw: bool) -> list[int]:
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise InputError(f"{llm.source.name}: has no tokenizer, so it cannot take text; give --prompt-ids")
    if raw or tokenizer.chat_template is None:
        return tokenizer.encode(text)
    return llm.encode_chat([{"role": "user", "content": text}])


def _show(deltas: Iterator[Delta], texts: Sequence[str | None], quiet: bool) -> list[RequestOutput]:
    """Print a single answer as it comes, several as they are finished; all outputs, in order."""
    outputs: dict[int, RequestOutput] = {}
    for delta in deltas:
        outputs[delta.index] = delta.output
        answers = len(delta.output.outputs)
        if quiet:
            continue
        if len(texts) == answers == 1:
            print(delta.text, end="", flush=True)
        elif delta.completion.finish_reason:
            label = f"{delta.index}" if answers == 1 else f"{delta.index}.{delta.completion.index}"
            print(f"[{label}] {texts[delta.index] or delta.output.prompt_token_ids}")
            print(_readable(delta.completion), end="\n\n", flush=True)
    if not quiet and len(texts) == len(outputs[0].outputs) == 1:
        (answer,) = outputs[0].outputs
        print(end="\n" if answer.text else _readable(answer) + "\n")
    return [outputs[index] for index in sorted(outputs)]


def _readable(answer: CompletionOutput) -> str:
    """An answer's text; its token ids where the model has no tokenizer."""
    return answer.text or " ".join(map(str, answer.token_ids))


def _document(outputs: Sequence[RequestOutput], watch: Watch) -> dict[str, Any]:
    answers = [(index, answer) for index, output in enumerate(outputs) for answer in output.outputs]
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(answer.token_ids) for _, answer in answers)
    return {
        "outputs": [_answer(index, answer) for index, answer in answers],
        "prompt_logprobs": [_positions(output.prompt_logprobs) for output in outputs],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
        "tokens_per_s": watch.tokens_per_s,
    }


def _answer(prompt: int, answer: CompletionOutput) -> dict[str, Any]:
    return {
        "prompt_index": prompt,
        "index": answer.index,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "cumulative_logprob": answer.cumulative_logprob,
        "logprobs": _positions(answer.logprobs),
    }


def _positions(logprobs: Sequence[dict[int, Logprob] | None] | None) -> list[list[dict[str, Any]] | None] | None:
    """For each position its token, then the likeliest ones; null for a prompt's first."""
    if logprobs is None:
        return None
    return [
        [
            {"token_id": token, "token": each.decoded_token, "logprob": each.logprob, "rank": each.rank}
            for token, each in entries.items()
        ]
        if entries is not None
        else None
        for entries in logprobs
    ]
