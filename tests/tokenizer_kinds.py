"""Small tokenizers of every kind, as files: trained on the fly, written as tokenizer.json, GGUF and tokenizer.model."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import tokenizers as hf
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from serried.text.byte_level import PRE_TOKENIZERS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ALPHABETS = [
    "abc XYZ", "the then there these ", "    \n\n\t\r", "0123456789 ", "½²٣๕Ⅷ", "日本語漢字、。한국어",
    "हिन्दी বাংলা ไทย", "😀👨‍👩‍👧🏳️‍🌈❤️🇯🇵", "éß\u0301\u0308ﬁΩ", "\x00\x01\x07\x1b\x7f\x85\u200b\u200d\ufeff\u2028",
    "'s't're'LL", "<|im_end|>", "<0x41>", "▁▁_", "_-+=!?.,;:()[]{}\"\\", "\u00a0\u2003\u3000",
    "\ufffd\ue000\U000f0000",
]  # fmt: skip
CONTROLS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CORPUS = [
    "the then there these them thesis, the theory of the thing", "a  b   c    d     e", "abc abc XYZ abcabc",
    "日本語 日本 漢字 한국어", "12 123 1234 2024", "don't, we'll, they're", "é été élève ß", "😀 😀😀",
    "def f(x):\n\n    return x\n", "▁ ▁▁ <a> im end",
] * 4  # fmt: skip


def random_text(rng: random.Random) -> str:
    """Pieces of words, scripts, emoji, controls and literals, of any characters, and of bytes that are no UTF-8."""
    pieces = []
    for _ in range(rng.randint(0, 8)):
        kind = rng.random()
        if kind < 0.7:
            pieces.append("".join(rng.choices(rng.choice(ALPHABETS), k=rng.randint(1, 6))))
        elif kind < 0.8:
            points = (rng.choice([rng.randrange(0x800), rng.randrange(0x110000)]) for _ in range(rng.randint(1, 3)))
            pieces.append("".join(chr(p) for p in points if not 0xD800 <= p < 0xE000))
        elif kind < 0.9:
            pieces.append(bytes(rng.choices(range(256), k=rng.randint(1, 5))).decode(errors="replace"))
        else:
            pieces.append(rng.choice([*CONTROLS, "<think>", "<unk>", "<0xF0>", " " * rng.randint(2, 20), "\n\n\n"]))
    return "".join(pieces)


def random_texts(count: int, seed: int = 0) -> Iterator[str]:
    rng = random.Random(seed)
    return (random_text(rng) for _ in range(count))


@dataclass
class Pieces:
    """A SentencePiece vocabulary: tokens, scores and types by id; `pairs` are the merges that it was trained with."""

    tokens: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    pairs: list[tuple[str, str]] = field(default_factory=list)

    def add(self, token: str, kind: int = NORMAL, score: float = 0.0) -> None:
        if token not in self.tokens:
            self.tokens.append(token)
            self.scores.append(score)
            self.types.append(kind)


@cache
def sentencepiece(gemma: bool = False) -> Pieces:
    """As SentencePiece lays a BPE vocabulary out: control tokens, bytes, merged pieces by rank, single characters."""
    trained = hf.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*|[^▁]+"), "isolated")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = Pieces()
    for token, kind in [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]:
        pieces.add(token, kind)
    if gemma:
        for token in ("\n\n", "\n\n\n", "<think>"):
            pieces.add(token, USER_DEFINED)
    for byte in range(256):
        pieces.add(f"<0x{byte:02X}>", BYTE)
    for left, right in model["merges"]:
        pieces.add(left + right, score=float(-len(pieces.tokens)))
        pieces.pairs.append((left, right))
    for token in sorted(model["vocab"]):
        pieces.add(token, score=float(-len(pieces.tokens)))
    for token in CONTROLS[2:]:
        pieces.add(token, CONTROL)
    if not gemma:
        pieces.add("<think>", USER_DEFINED)
    return pieces


@cache
def unigram() -> Pieces:
    trained = hf.Tokenizer(models.Unigram())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*|[^▁]+"), "isolated")
    trained.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=150, show_progress=False))
    pieces = Pieces()
    for token, kind in [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]:
        pieces.add(token, kind)
    for token, score in json.loads(trained.to_str())["model"]["vocab"]:
        pieces.add(token, score=struct.unpack("<f", struct.pack("<f", score))[0])  # files hold float32
    return pieces


@cache
def byte_level(pre: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens by id and merges, trained behind a pre-tokenizer; control tokens last, as Qwen and Llama 3 have them."""
    trained = hf.Tokenizer(models.BPE())
    trained.pre_tokenizer = cut_by(pre)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    vocab = model["vocab"]
    return [*sorted(vocab, key=vocab.__getitem__), *CONTROLS, "<think>"], [tuple(pair) for pair in model["merges"]]


def cut_by(pre: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in PRE_TOKENIZERS[pre]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def sentencepiece_backend(prefix: str, gemma: bool = False) -> hf.Tokenizer:
    """As the tokenizer.json of Llama 2 (`always`), of newer Mistral models (`first`), of Gemma (`never`) has it."""
    pieces = sentencepiece(gemma)
    vocab = {token: index for index, token in enumerate(pieces.tokens)}
    merges = derived_merges(pieces, gemma)
    backend = hf.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix == "always":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif prefix == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    if prefix != "never":
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return with_added(backend, pieces.tokens, pieces.types)


def derived_merges(pieces: Pieces, by_id: bool) -> list[tuple[str, str]]:
    """transformers' own derivation, without the tokens that text must not become."""
    from transformers.tokenization_utils_base import generate_merges

    vocab = {token: index for index, token in enumerate(pieces.tokens)}
    scores = {t: -i if by_id else s for i, (t, s) in enumerate(zip(pieces.tokens, pieces.scores, strict=True))}
    out = [t for t, kind in zip(pieces.tokens, pieces.types, strict=True) if kind in {UNKNOWN, CONTROL, BYTE}]
    merges: list[tuple[str, str]] = generate_merges(vocab, scores, skip_tokens=out)
    return merges


def with_added(
    backend: hf.Tokenizer, tokens: Sequence[str], types: Sequence[int], rstrip: bool = False
) -> hf.Tokenizer:
    for token, kind in zip(tokens, types, strict=True):
        if kind in {UNKNOWN, CONTROL, USER_DEFINED}:
            strips = rstrip and token not in {"<unk>", "<s>"}
            added = AddedToken(token, normalized=False, special=kind != USER_DEFINED, rstrip=strips)
            backend.add_tokens([added])
    return backend


def byte_level_backend(pre: str, composed: bool = False, whole: bool = False) -> hf.Tokenizer:
    tokens, merges = byte_level(pre)
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = hf.Tokenizer(models.BPE(vocab, merges, ignore_merges=whole))
    if composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = cut_by(pre)
    backend.decoder = decoders.ByteLevel()
    kinds = [CONTROL if t in CONTROLS else USER_DEFINED if t == "<think>" else NORMAL for t in tokens]
    return with_added(backend, tokens, kinds)


def unigram_backend() -> hf.Tokenizer:
    """As the tokenizer.json of a Unigram model: no bytes, words cut at spaces."""
    pieces = unigram()
    backend = hf.Tokenizer(models.Unigram(list(zip(pieces.tokens, pieces.scores, strict=True)), unk_id=0))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    backend.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    return with_added(backend, pieces.tokens, pieces.types)


def with_bos(backend: hf.Tokenizer) -> hf.Tokenizer:
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return backend


def phi3_backend() -> hf.Tokenizer:
    pieces = sentencepiece()
    plain = sentencepiece_backend("always")
    backend = hf.Tokenizer(plain.model)
    backend.normalizer, backend.decoder = plain.normalizer, plain.decoder
    return with_bos(with_added(backend, pieces.tokens, pieces.types, rstrip=True))


DIRECTORIES: dict[str, Callable[[], hf.Tokenizer]] = {
    "llama 2": lambda: with_bos(sentencepiece_backend("always")),
    "mistral": lambda: with_bos(sentencepiece_backend("first")),
    "gemma": lambda: with_bos(sentencepiece_backend("never", gemma=True)),
    "phi 3": phi3_backend,
    "llama 3": lambda: with_bos(byte_level_backend("llama-bpe", whole=True)),
    "qwen 2": lambda: byte_level_backend("qwen2", composed=True),
    "tekken": lambda: byte_level_backend("tekken", whole=True),
    "smollm": lambda: byte_level_backend("smollm"),
    "gpt 2": lambda: byte_level_backend("gpt-2"),
    "unigram": unigram_backend,
}


def write_directory(path: Path, backend: hf.Tokenizer) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    present = {key: token for key, token in named.items() if backend.token_to_id(token) is not None}
    (path / "tokenizer_config.json").write_text(json.dumps({**present, "tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


def gguf_metadata(kind: str) -> dict[str, Any]:
    """`llama`, `gemma3` or `phi3` for the SentencePiece kinds, else the name of a byte-level pre-tokenizer."""
    if kind in {"llama", "gemma3", "phi3"}:
        pieces = sentencepiece(kind == "gemma3")
        # Gemma's files spell runs of spaces as they are.
        tokens = [" " * len(t) if kind == "gemma3" and len(t) > 1 and not t.strip("▁") else t for t in pieces.tokens]
        values: dict[str, Any] = {"model": "llama", "tokens": tokens, "scores": pieces.scores}
        values |= {"token_type": pieces.types, "unknown_token_id": 0, "add_space_prefix": kind != "gemma3"}
        values["token_type"] = [USER_DEFINED if " " in t else k for t, k in zip(tokens, pieces.types, strict=True)]
    else:
        tokens, merges = byte_level(kind)
        values = {"model": "gpt2", "pre": kind, "tokens": tokens, "merges": [" ".join(pair) for pair in merges]}
        values["token_type"] = [
            CONTROL if t in CONTROLS else USER_DEFINED if t == "<think>" else NORMAL for t in tokens
        ]
    values |= {"bos_token_id": tokens.index("<s>"), "eos_token_id": tokens.index("</s>"), "add_bos_token": True}
    architecture = kind if kind in {"gemma3", "phi3"} else "llama"
    return {"general.architecture": architecture, **{f"tokenizer.ggml.{key}": v for key, v in values.items()}}


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file without tensors, complete enough for transformers to make a config of."""
    architecture = metadata["general.architecture"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_rope_dimension_count(32)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def spec(pieces: Pieces, kind: int, **rules: Any) -> SimpleNamespace:
    """A SentencePiece model by the names of its own format; kind: 1 for Unigram, 2 for BPE."""
    has_bytes = BYTE in pieces.types
    return SimpleNamespace(
        pieces=[
            SimpleNamespace(piece=token, score=score, type=kind_of)
            for token, score, kind_of in zip(pieces.tokens, pieces.scores, pieces.types, strict=True)
        ],
        trainer_spec=SimpleNamespace(model_type=kind, byte_fallback=has_bytes, unk_piece="<unk>", unk_id=0),
        normalizer_spec=SimpleNamespace(
            precompiled_charsmap=rules.get("charsmap", b""),
            add_dummy_prefix=rules.get("prefix", True),
            remove_extra_whitespaces=rules.get("squeeze", False),
            escape_whitespaces=True,
        ),
    )


def serialized(model: SimpleNamespace) -> bytes:
    """The bytes of a tokenizer.model, field by field."""
    trainer, rules = model.trainer_spec, model.normalizer_spec
    data = b""
    for piece in model.pieces:
        inner = _bytes(1, piece.piece.encode()) + _tag(2, 5) + struct.pack("<f", piece.score)
        data += _bytes(1, inner + (_number(3, piece.type) if piece.type != NORMAL else b""))
    data += _bytes(2, _number(3, trainer.model_type) + _number(35, trainer.byte_fallback) + _number(43, (1 << 64) - 1))
    flags = (rules.add_dummy_prefix, rules.remove_extra_whitespaces, rules.escape_whitespaces)
    switches = b"".join(_number(number, flag) for number, flag in enumerate(flags, 3))
    return data + _bytes(3, _bytes(1, b"identity") + _bytes(2, rules.precompiled_charsmap) + switches)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _tag(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _number(number: int, value: int) -> bytes:
    return _tag(number, 0) + _varint(int(value))


def _bytes(number: int, value: bytes) -> bytes:
    return _tag(number, 2) + _varint(len(value)) + value
