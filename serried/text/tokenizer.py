"""Text to token ids and back, by the `tokenizers` library, from a Hugging Face directory or GGUF metadata."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from serried.errors import InputError
from serried.text.gguf_tokenizer import rebuild

if TYPE_CHECKING:
    import tokenizers

# Byte-level vocabularies write printable Latin-1 as it is, and the other bytes as characters from 256 on.
_PLAIN: Final = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_ALPHABET = {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in _PLAIN)}
_ALPHABET |= {chr(byte): byte for byte in _PLAIN}
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def check_text(text: str, what: str = "the text") -> str:
    """Return the text; a lone surrogate (half a character, so no text) -> InputError with its position."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = f"U+{ord(text[error.start]):04X}"
        raise InputError(f"{what} has a lone surrogate ({bad}) at position {error.start}: not text") from None
    return text


class Tokenizer:
    """One vocabulary: text to ids (special-token literals stay text unless asked for) and ids to text.

    `control_ids` are what `decode` leaves out, `control_literals` their text; `special_tokens` has the named
    ones for chat templates. Safe to share between threads.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        frame: tuple[Sequence[int], Sequence[int]] = ((), ()),
        bos_id: int | None = None,
        eos_ids: frozenset[int] = frozenset(),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._prefix, self._suffix = frame
        self.bos_id, self.eos_ids = bos_id, eos_ids
        self.special_tokens: dict[str, str] = dict(special_tokens or {})
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self._added = {index: added[index] for index in sorted(added)}
        self.control_literals: dict[str, int] = {t.content: i for i, t in self._added.items() if t.special}
        self.control_ids = frozenset(self.control_literals.values())
        unknown = (self.special_tokens.get("unk_token"), getattr(backend.model, "unk_token", None))
        self._unknown = frozenset(self.control_literals[name] for name in unknown if name in self.control_literals)
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = max(backend.get_vocab_size(), max(self._added, default=-1) + 1)

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json and the files beside it; a missing or damaged one -> InputError naming it."""
        import tokenizers as hf

        directory = Path(path)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{path}: no such file; a model directory needs one (`save_pretrained` writes it)")
        try:
            backend = hf.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"{path}: not a tokenizer: {error}") from None
        config = _read_json(directory / "tokenizer_config.json")
        named = _special_names(_read_json(directory / "special_tokens_map.json") | config)
        try:
            _add_tokens(backend, config, named)
            template = _template(directory, config)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = "tokenizer_config.json (added_tokens_decoder, chat_template) or chat_template.jinja"
            raise InputError(f"{directory}: malformed {what}: {error!r}") from None
        bos = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
        eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
        declared = _read_json(directory / "generation_config.json").get("eos_token_id")
        if declared is None:
            declared = _read_json(directory / "config.json").get("eos_token_id")
        ends = declared if isinstance(declared, list) else [declared]
        return cls(
            backend,
            frame=_frame(backend, config, bos, eos),
            bos_id=bos,
            eos_ids=frozenset(index for index in (eos, *ends) if isinstance(index, int)),
            special_tokens=named,
            chat_template=template,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Rebuild byte-level BPE from GGUF metadata; anything else -> InputError naming the key."""
        return cls(**rebuild(metadata)._asdict())

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of a text, between BOS and EOS where the model wants them (`add_special`).

        With `parse_special`, special-token literals become control ids: only for text that we wrote.
        A lone surrogate -> InputError.
        """
        if parse_special:
            ids = self._backend.encode(check_text(text), add_special_tokens=False).ids
        else:
            ids = self.encode_parts([text])
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Ids of one text given in parts: strings, in which literals stay text, and control ids."""
        backend, names, renumber = self._literal
        text = check_text("".join(names[part] if isinstance(part, int) else part for part in parts))
        ids = backend.encode(text, add_special_tokens=False).ids
        # A Unigram or WordPiece model may hold control tokens as ordinary pieces.
        for index in self.control_ids.intersection(ids) - self._unknown:
            literal = self._added[index].content
            raise InputError(f"this tokenizer cannot write {literal!r} as plain text: remove it from the text")
        return [renumber.get(index, index) for index in ids]

    @cached_property
    def _literal(self) -> tuple[tokenizers.Tokenizer, dict[int, str], dict[int, int]]:
        """A twin (it shares the vocabulary) in which special tokens are text and secret names stand for them.

        A twin, not a switch: changing the backend while another thread uses it raises. Nobody can guess
        the names, so no text of a user can hold one.
        """
        import tokenizers as hf

        twin = hf.Tokenizer(self._backend.model)
        for name in ("normalizer", "pre_tokenizer"):
            if (part := getattr(self._backend, name)) is not None:
                setattr(twin, name, part)
        twin.add_tokens(list(self._added.values()))
        twin.encode_special_tokens = True
        nonce = secrets.token_hex(16)
        names: dict[int, str] = {}
        renumber: dict[int | None, int] = {}
        for index, token in self._added.items():
            # Added tokens get consecutive ids here, where the file may have gaps.
            renumber[twin.token_to_id(token.content)] = index
            if token.special:
                names[index] = f"\ue000{nonce}:{index}\ue001"
                sides = {"lstrip": token.lstrip, "rstrip": token.rstrip}
                twin.add_tokens([hf.AddedToken(names[index], normalized=False, **sides)])
        # Looked up last: an id that a stand-in got may be the id that a token has in the file.
        stand_ins = {twin.token_to_id(name): index for index, name in names.items()}
        return twin, names, {new: old for new, old in (renumber | stand_ins).items() if new is not None}

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of a whole sequence at once; ids that the vocabulary lacks give nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_piece(self, token_id: int) -> str | None:
        """How the vocabulary spells a token, or None for an id that it lacks."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in running text; none for an id that the vocabulary lacks."""
        if (known := self._bytes.get(token_id)) is None:
            known = self._bytes[token_id] = self._spell(self.token_piece(token_id) or "")
        return known

    def _spell(self, piece: str) -> bytes:
        if self.decoder_steps and self.decoder_steps[-1]["type"] == "ByteLevel":
            try:
                return bytes(_ALPHABET[character] for character in piece)
            except KeyError:  # an added token, written as it is
                return piece.encode()
        if (match := _BYTE_TOKEN.fullmatch(piece)) is not None:
            return bytes.fromhex(match[1])
        return piece.replace("▁", " ").encode()

    @cached_property
    def decoder_steps(self) -> tuple[dict[str, Any], ...]:
        """The decoder as the library describes it, a step each; empty where there is none."""
        if self._backend.decoder is None:
            return ()
        state = json.loads(self._backend.decoder.__getstate__())
        return tuple(state["decoders"]) if state["type"] == "Sequence" else (state,)


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
