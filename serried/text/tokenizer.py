"""Text to token ids and back, by the `tokenizers` library, from a Hugging Face directory or GGUF metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from serried.errors import InputError
from serried.text.directory import directory_vocabulary
from serried.text.gguf_tokenizer import gguf_vocabulary
from serried.text.literal import LiteralEncoder

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
        self.control_literals: dict[str, int] = {added[i].content: i for i in sorted(added) if added[i].special}
        self.control_ids = frozenset(self.control_literals.values())
        unknown = (self.special_tokens.get("unk_token"), getattr(backend.model, "unk_token", None))
        self._unknown = tuple(name for name in unknown if isinstance(name, str))
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = max(backend.get_vocab_size(), max(added, default=-1) + 1)

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json or tokenizer.model, and the files beside it; missing or damaged -> InputError."""
        return cls(**directory_vocabulary(Path(path))._asdict())

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Rebuild a tokenizer from GGUF metadata; an unknown kind, or damage -> InputError naming the key."""
        return cls(**gguf_vocabulary(metadata)._asdict())

    def save(self, directory: Path) -> None:
        """Write what `from_directory` reads, but for end tokens beyond the first: these stand in config.json."""
        self._backend.save(str(directory / "tokenizer.json"))
        config = {
            **self.special_tokens,
            "add_bos_token": bool(self._prefix),
            "add_eos_token": bool(self._suffix),
            **({"chat_template": self.chat_template} if self.chat_template else {}),
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

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
        check_text("".join(part for part in parts if isinstance(part, str)))
        ids = self._literal.encode(parts)
        if ids is None:
            ids = self._strict.encode(parts) or []
        return ids

    @cached_property
    def _literal(self) -> LiteralEncoder:
        return LiteralEncoder(self._backend, self.control_literals, self._unknown)

    @cached_property
    def _strict(self) -> LiteralEncoder:
        """For the few vocabularies whose pieces could make up a control token; building it copies the model."""
        return LiteralEncoder(self._backend, self.control_literals, self._unknown, strict=True)

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
