"""The vocabulary of a Hugging Face directory: tokenizer.json or tokenizer.model, and what the files beside it add."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from serried.errors import InputError
from serried.text.sentencepiece_file import read_sentencepiece
from serried.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    import tokenizers

FILES: Final = ("tokenizer.json", "tokenizer.model")  # one of them makes a tokenizer; the first is preferred


def has_tokenizer(directory: Path) -> bool:
    """Whether there is a file to make a tokenizer of."""
    return any((directory / name).is_file() for name in FILES)


def directory_vocabulary(directory: Path) -> Vocabulary:
    """Read what there is; a file that is missing or damaged -> InputError naming it."""
    config = _read_json(directory / "tokenizer_config.json")
    named = _special_names(_read_json(directory / "special_tokens_map.json") | config)
    own, sentencepiece = (directory / name for name in FILES)
    try:
        if own.is_file():
            backend = _read_backend(own)
            _add_tokens(backend, config, named)
        elif sentencepiece.is_file():
            backend, config, named = _converted(directory, config, named)
        else:
            raise InputError(
                f"{own}: no such file; a model directory needs one (`save_pretrained` writes it), or a "
                f"{sentencepiece.name} of SentencePiece"
            )
        template = _template(directory, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = "tokenizer_config.json (added_tokens_decoder, chat_template) or chat_template.jinja"
        raise InputError(f"{directory}: malformed {what}: {error!r}") from None
    bos = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return Vocabulary(
        backend,
        frame=_frame(backend, config, bos, eos),
        bos_id=bos,
        eos_ids=frozenset(index for index in (eos, *_declared_ends(directory)) if isinstance(index, int)),
        special_tokens=named,
        chat_template=template,
    )


def _declared_ends(directory: Path) -> list[Any]:
    """The end tokens of generation_config.json, else of config.json: one, a list, or none."""
    declared = _read_json(directory / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = _read_json(directory / "config.json").get("eos_token_id")
    return declared if isinstance(declared, list) else [declared]


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    import tokenizers as hf

    try:
        return hf.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{path}: not a tokenizer: {error}") from None


def _converted(
    directory: Path, config: Mapping[str, Any], named: Mapping[str, str]
) -> tuple[tokenizers.Tokenizer, dict[str, Any], dict[str, str]]:
    """A tokenizer.model, the configuration and the named tokens completed by what it says itself.

    `legacy: false` in tokenizer_config.json is how Hugging Face asks for a space before the first word only.
    """
    read = read_sentencepiece(directory / FILES[1], "first" if config.get("legacy") is False else "always")
    own = {"bos_token": read.bos, "eos_token": read.eos, "unk_token": read.unknown}
    flags = {"add_bos_token": read.bos is not None, "add_eos_token": False}
    given = {key: value for key, value in config.items() if value is not None or key not in flags}
    older = _read_json(directory / "added_tokens.json")  # where tokens were declared before tokenizer_config.json
    declared: dict[str, Any] = {str(i): {"content": token, "normalized": False} for token, i in older.items()}
    declared |= config.get("added_tokens_decoder") or {}
    given["added_tokens_decoder"] = declared
    complete = {key: token for key, token in own.items() if token} | dict(named)
    _add_tokens(read.backend, given, complete)
    for index, entry in declared.items():  # nothing but these files says which ids the additions have
        if (found := read.backend.token_to_id(entry["content"])) != int(index):
            raise InputError(
                f"{directory}: added_tokens.json or tokenizer_config.json: {entry['content']!r} is {index}; expected "
                f"{found}, as {FILES[1]} has it or the next free id"
            )
    return read.backend, flags | given, complete


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} where there is no such file; damaged -> InputError naming it."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: a JSON object was expected, not {type(value).__name__}")
    return value


def _special_names(config: Mapping[str, Any]) -> dict[str, str]:
    """The entries such as bos_token, whose values are strings or objects with the string as `content`."""
    values = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
    return {key: value for key, value in values.items() if isinstance(value, str)}


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Add what tokenizer_config.json declares beyond tokenizer.json, in the order of the ids."""
    import tokenizers as hf

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    fields = ("lstrip", "rstrip", "single_word", "normalized", "special")
    declared = config.get("added_tokens_decoder") or {}
    for _, spec in sorted(declared.items(), key=lambda item: int(item[0])):
        if spec["content"] not in known:
            token = hf.AddedToken(spec["content"], **{name: spec[name] for name in fields if name in spec})
            backend.add_tokens([token])
            known.add(spec["content"])
    for content in named.values():
        if content not in known and backend.token_to_id(content) is not None:
            backend.add_special_tokens([content])


def _frame(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], bos: int | None, eos: int | None
) -> tuple[list[int], list[int]]:
    """The ids before and after a text: as tokenizer_config.json says, else as tokenizer.json does."""
    if config.get("add_bos_token") is not None or config.get("add_eos_token") is not None:
        flags = (bos, config.get("add_bos_token")), (eos, config.get("add_eos_token"))
        first, last = ([index] if index is not None and flag else [] for index, flag in flags)
        return first, last
    sample = backend.encode("a", add_special_tokens=True)
    mask = sample.special_tokens_mask
    start = mask.index(0) if 0 in mask else len(mask)
    end = len(mask) - mask[::-1].index(0) if 0 in mask else len(mask)
    return sample.ids[:start], sample.ids[end:]


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the one in tokenizer_config.json (of several, the one named default)."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None
