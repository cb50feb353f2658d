"""`serried tokenize`: show what a model's tokenizer makes of text, and of token ids."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from serried.cli.options import integers
from serried.cli.standard_input import read_text
from serried.errors import InputError
from serried.models.registry import demo_path, open_model
from serried.text.chat import encode_chat, read_template
from serried.text.tokenizer import Tokenizer
from serried.weights.gguf_file import GGUFFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face directory, a .gguf file, a hub id, or `demo`")
    parser.add_argument("texts", metavar="TEXT", nargs="*", help="each is tokenized by itself; - reads standard input")
    parser.add_argument("--decode", type=integers("--decode"), action="append", default=[], help="token ids: 1,2,3")
    parser.add_argument("--chat", action="store_true", help="apply the chat template: each TEXT is a user's message")
    parser.add_argument("--system", help="with --chat: the system prompt")
    parser.add_argument("--chat-template", metavar="FILE", help="with --chat: a template instead of the model's own")
    parser.add_argument("--no-special", action="store_true", help="leave out the BOS and EOS that the model wants")
    parser.add_argument("--parse-special", action="store_true", help="read <|im_end|> and its like as control tokens")
    parser.add_argument("--revision", help="branch, tag or commit of a model on the hub (default: its main branch)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


class Tokenized(NamedTuple):
    """A text and its token ids, whichever was given."""

    text: str
    ids: list[int]


def run(args: argparse.Namespace) -> int:
    if not args.texts and not args.decode:
        raise InputError("no text: give some, - for standard input, or --decode with token ids")
    if not args.chat and (args.system, args.chat_template) != (None, None):
        raise InputError("--system, --chat-template: they belong to a chat; add --chat")
    if args.chat and (args.no_special or args.parse_special):
        raise InputError("--no-special, --parse-special: with --chat the template decides")
    tokenizer = open_tokenizer(args.model, args.revision)
    texts = [read_text() if text == "-" else text for text in args.texts]
    found = [Tokenized(text, _encode(tokenizer, text, args)) for text in texts]
    found += [Tokenized(_decode(tokenizer, ids), list(ids)) for ids in args.decode]
    if args.json:
        print(json.dumps({"outputs": [_document(tokenizer, each) for each in found]}))
        return 0
    for number, each in enumerate(found):
        if number:
            print()
        if args.chat or number >= len(texts):
            print(tokenizer.decode(each.ids, skip_special=False), end="\n\n")
        _print(tokenizer, each.ids)
    return 0


def open_tokenizer(model: str, revision: str | None = None) -> Tokenizer:
    """A model's tokenizer, without its weights; a preset has none -> InputError."""
    path = demo_path() if model == "demo" else Path(model)
    if path.is_file():
        file = GGUFFile(path)
        file.close()
        return Tokenizer.from_gguf(file.metadata)
    # A directory need not hold a model that could run.
    directory = path if path.is_dir() else open_model(model, revision, weights=False).directory
    if directory is None:
        raise InputError(f"{model}: a preset has no tokenizer; give a directory, a .gguf file or `demo`")
    return Tokenizer.from_directory(directory)


def _encode(tokenizer: Tokenizer, text: str, args: argparse.Namespace) -> list[int]:
    if not args.chat:
        return tokenizer.encode(text, add_special=not args.no_special, parse_special=args.parse_special)
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages.append({"role": "user", "content": text})
    return encode_chat(tokenizer, messages, chat_template=read_template(args.chat_template))


def _decode(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    for index in ids:
        if not 0 <= index < tokenizer.vocab_size:
            raise InputError(f"--decode {index}: not in the vocabulary of {tokenizer.vocab_size}")
    return tokenizer.decode(ids, skip_special=False)


def _document(tokenizer: Tokenizer, each: Tokenized) -> dict[str, Any]:
    pieces = [tokenizer.token_piece(index) for index in each.ids]
    return {"text": each.text, "token_ids": each.ids, "pieces": pieces, "count": len(each.ids)}


def _print(tokenizer: Tokenizer, ids: list[int]) -> None:
    """A token a line: its id, how the vocabulary spells it, what it stands for where that is something else."""
    rows = [(index, visible(tokenizer.token_piece(index) or ""), _meaning(tokenizer, index)) for index in ids]
    wide = max((len(piece) for _, piece, _ in rows), default=0)
    for index, piece, meaning in rows:
        print(f"{index:>7}  {piece:{wide}}  {meaning}".rstrip())
    print(f"{len(ids)} token{'s' * (len(ids) != 1)}{': ' * bool(ids)}{','.join(map(str, ids))}")


def _meaning(tokenizer: Tokenizer, index: int) -> str:
    """A token's text in quotes, or its bytes where they are part of a character; nothing for a control token."""
    if index in tokenizer.control_ids:
        return "(control)"
    spelled = tokenizer.token_bytes(index)
    try:
        text = spelled.decode()
    except UnicodeDecodeError:
        return str(spelled)
    return "" if text == tokenizer.token_piece(index) and visible(text) == text else repr(text)


def visible(text: str) -> str:
    """A text with escapes for what a terminal would not show, or would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
