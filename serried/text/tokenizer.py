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

if TYPE_CHECKING:
    import tokenizers

# How each vocabulary cuts text before its merges apply. The names are llama.cpp's values of
# tokenizer.ggml.pre; every regex cuts what the one before it left (an empty tuple is GPT-2's alone).
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35: Final = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PRE_TOKENIZERS: Final[dict[str, tuple[str, ...]]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
}
# These look a whole piece of text up before they merge, and start a sequence with BOS unless told otherwise.
_WHOLE_PIECES: Final = frozenset(k for k, v in _PRE_TOKENIZERS.items() if v in ((_LLAMA3,), (_TEKKEN,)))
# The original tokenizers of these compose characters first; GGUF does not say so.
_COMPOSED: Final = frozenset({"qwen2", "qwen35"})
# GGUF names one end token, chat models have several; llama.cpp finds the others by these names.
_END_NAMES = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>"}
_END_NAMES |= {"<end_of_turn>", "<EOT>", "<_EOT>"}
_CONTROL, _USER_DEFINED = 3, 4
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def check_text(text: str, what: str = "the text") -> str:
    """Return the text; a lone surrogate (half a character, so no text) -> InputError with its position."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = f"U+{ord(text[error.start]):04X}"
        raise InputError(f"{what} has a lone surrogate ({bad}) at position {error.start}: not text") from None
    return text


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write for the 256 bytes: printable Latin-1 as it is."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


class Tokenizer:
    """One vocabulary: text to ids (special-token literals stay text unless asked for) and ids to text.

    `bos_id` and `eos_ids` are the control ids, `special_tokens` their literals for chat templates.
    Safe to share between threads.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        bos_id: int | None = None,
        eos_ids: frozenset[int] = frozenset(),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._prefix, self._suffix = list(prefix), list(suffix)
        self.bos_id, self.eos_ids = bos_id, eos_ids
        self.special_tokens: dict[str, str] = dict(special_tokens or {})
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self._added = {index: added[index] for index in sorted(added)}
        self.control_literals: dict[str, int] = {t.content: i for i, t in self._added.items() if t.special}
        self._control = frozenset(self.control_literals.values())
        unknown = (self.special_tokens.get("unk_token"), getattr(backend.model, "unk_token", None))
        self._unknown = frozenset(self.control_literals[name] for name in unknown if name in self.control_literals)
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = max(backend.get_vocab_size(), max(self._added, default=-1) + 1)

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json and the files beside it; a missing or damaged one -> InputError naming it."""
        return _from_directory(Path(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Rebuild byte-level BPE from GGUF metadata; anything else -> InputError naming the key."""
        return _from_gguf(metadata)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of a text, between BOS and EOS where the model wants them (`add_special`).

        With `parse_special`, special-token literals become control ids: only for text that we wrote.
        A lone surrogate -> InputError.
        """
        if parse_special:
            ids: list[int] = self._backend.encode(check_text(text), add_special_tokens=False).ids
        else:
            ids = self.encode_parts([text])
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Ids of one text given in parts: strings, in which literals stay text, and control ids."""
        backend, names, renumber = self._literal
        text = check_text("".join(names[part] if isinstance(part, int) else part for part in parts))
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        # A Unigram or WordPiece model may hold control tokens as ordinary pieces.
        for index in self._control.intersection(ids) - self._unknown:
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
        if self._backend.normalizer is not None:
            twin.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            twin.pre_tokenizer = self._backend.pre_tokenizer
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
                stand_in = hf.AddedToken(
                    names[index], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False
                )
                twin.add_tokens([stand_in])
        # Looked up last: an id that a stand-in got may be the id that a token has in the file.
        stand_ins = {twin.token_to_id(name): index for index, name in names.items()}
        return twin, names, {new: old for new, old in (renumber | stand_ins).items() if new is not None}

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of a whole sequence at once; ids that the vocabulary lacks give nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def is_control(self, token_id: int) -> bool:
        """Whether `decode` leaves this id out when it skips special tokens."""
        return token_id in self._control

    def token_piece(self, token_id: int) -> str | None:
        """How the vocabulary spells a token, or None for an id that it lacks."""
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

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


_ALPHABET: Final = _byte_alphabet()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(f"{path}: not readable as text: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} where there is no such file; damaged -> InputError naming it."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise InputError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: a JSON object was expected, not {type(value).__name__}")
    return value


def _from_directory(directory: Path) -> Tokenizer:
    import tokenizers as hf

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
        where = directory / "tokenizer_config.json"
        raise InputError(f"{where}: malformed added_tokens_decoder or chat_template: {error!r}") from None
    bos = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    prefix, suffix = _frame(backend, config, bos, eos)
    declared = _read_json(directory / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = _read_json(directory / "config.json").get("eos_token_id")
    ends = declared if isinstance(declared, list) else [declared]
    return Tokenizer(
        backend,
        prefix=prefix,
        suffix=suffix,
        bos_id=bos,
        eos_ids=frozenset(index for index in (eos, *ends) if isinstance(index, int)),
        special_tokens=named,
        chat_template=template,
    )


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
        return (
            [bos] if bos is not None and config.get("add_bos_token") else [],
            [eos] if eos is not None and config.get("add_eos_token") else [],
        )
    sample = backend.encode("a", add_special_tokens=True)
    mask = sample.special_tokens_mask
    first = mask.index(0) if 0 in mask else len(mask)
    after = len(mask) - mask[::-1].index(0) if 0 in mask else len(mask)
    return sample.ids[:first], sample.ids[after:]


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the one in tokenizer_config.json (of several, the one named default)."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _gguf_tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int], list[tuple[str, str]], str]:
    """Tokens, their types, merges and the name of the pre-tokenizer; missing or unknown -> InputError."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise InputError(f"tokenizer.ggml.model is {model!r}: only 'gpt2' (byte-level BPE) is read from GGUF")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise InputError(f"tokenizer.ggml.pre is {pre!r}: known are {', '.join(sorted(_PRE_TOKENIZERS))}")
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if key not in metadata:
            raise InputError(f"{key} is missing from the GGUF file: no tokenizer without it")
    tokens = [str(token) for token in metadata["tokenizer.ggml.tokens"]]
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())] or [1] * len(tokens)
    if len(types) != len(tokens):
        raise InputError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    merges = [tuple(str(merge).split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    return tokens, types, [(pair[0], pair[-1]) for pair in merges], pre


def _gguf_backend(tokens: list[str], types: list[int], merges: list[tuple[str, str]], pre: str) -> tokenizers.Tokenizer:
    import tokenizers as hf
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_PIECES)
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from None
    backend = hf.Tokenizer(model)
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(hf.Regex(regex), "isolated") for regex in _PRE_TOKENIZERS[pre]]
    # tokenizer.ggml.add_space_prefix is for SentencePiece; llama.cpp ignores it here too.
    bytes_last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_last])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            hf.AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED) and token
        ]
    )
    return backend


def _from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens, types, merges, pre = _gguf_tokens(metadata)
    ids: dict[str, int] = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key in metadata:
            ids[name] = int(metadata[key])
            if not 0 <= ids[name] < len(tokens):
                raise InputError(f"{key} is {ids[name]}, but there are {len(tokens)} tokens")
            # A token that the file names has a part to play, whatever its type says.
            types[ids[name]] = _CONTROL
    named_ends = {i for i, kind in enumerate(types) if kind == _CONTROL and tokens[i] in _END_NAMES}
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", pre in _WHOLE_PIECES)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        _gguf_backend(tokens, types, merges, pre),
        prefix=[ids["bos"]] if add_bos and "bos" in ids else [],
        suffix=[ids["eos"]] if add_eos and "eos" in ids else [],
        bos_id=ids.get("bos"),
        eos_ids=frozenset(named_ends | {ids[name] for name in ("eos", "eot", "eom") if name in ids}),
        special_tokens={names[name]: tokens[index] for name, index in ids.items() if name in names},
        chat_template=template if isinstance(template, str) else None,
    )
