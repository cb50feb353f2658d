"""`serried generate`: answer prompts from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from serried.cli.options import (
    add_engine_arguments,
    add_tp_argument,
    engine_options,
    integer,
    integers,
    number,
)
from serried.cli.watch import Watch
from serried.engine.llm import LLM
from serried.engine.outputs import Delta, RequestOutput
from serried.errors import InputError
from serried.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    add_tp_argument(parser)
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="one answer each; - reads standard input")
    parser.add_argument(
        "--prompt-ids", type=integers("--prompt-ids"), action="append", help="a prompt as token ids: 1,2,3"
    )
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=integer("--max-tokens"), default=128, help="default 128")
    group.add_argument(
        "--temperature", type=number("--temperature"), default=0.0, help="default 0: the likeliest token"
    )
    group.add_argument("--top-k", type=integer("--top-k"), default=0)
    group.add_argument("--top-p", type=number("--top-p"), default=1.0)
    group.add_argument("--stop", action="append", default=[], help="end the text before this; may be repeated")
    group.add_argument("--stop-token-ids", type=integers("--stop-token-ids"), default=())
    group.add_argument("--ignore-eos", action="store_true", help="go on after an end token")


def run(args: argparse.Namespace) -> int:
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=args.stop,
        stop_token_ids=args.stop_token_ids,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
    )
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompts]
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
        if quiet:
            continue
        if len(texts) == 1:
            print(delta.text, end="", flush=True)
        elif delta.output.finished:
            print(f"[{delta.index}] {texts[delta.index] or delta.output.prompt_token_ids}")
            print(_readable(delta.output), end="\n\n", flush=True)
    if not quiet and len(texts) == 1:
        print(end="\n" if outputs[0].outputs[0].text else _readable(outputs[0]) + "\n")
    return [outputs[index] for index in sorted(outputs)]


def _readable(output: RequestOutput) -> str:
    """An answer's text; its token ids where the model has no tokenizer."""
    answer = output.outputs[0]
    return answer.text or " ".join(map(str, answer.token_ids))


def _document(outputs: Sequence[RequestOutput], watch: Watch) -> dict[str, Any]:
    answers = [output.outputs[0] for output in outputs]
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(answer.token_ids) for answer in answers)
    return {
        "outputs": [
            {
                "text": answer.text,
                "token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
                "logprobs": None,
            }
            for answer in answers
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
        "tokens_per_s": watch.tokens_per_s,
    }
