"""Every kind of tokenizer: the ids of transformers, and text back, on random strings; literals stay text."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers as hf
from tokenizer_kinds import (
    BYTE,
    CONTROL,
    DIRECTORIES,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Pieces,
    gguf_metadata,
    phi3_backend,
    random_texts,
    sentencepiece,
    serialized,
    spec,
    unigram,
    with_added,
    write_directory,
    write_gguf,
)
from tokenizers import decoders, models, normalizers, pre_tokenizers

from serried.errors import InputError
from serried.text.tokenizer import Tokenizer
from serried.weights.gguf_file import GGUFFile

COUNTS = [500, pytest.param(10_000, marks=pytest.mark.soak)]


def same(mine: Tokenizer, reference: Any, count: int, skip: str = "(?!)") -> None:
    """Ids and text equal those of transformers; without control tokens in it, a text is the same as a user's."""
    for text in random_texts(count):
        if re.search(skip, text):
            continue
        ids = reference.encode(text)
        assert mine.encode(text, parse_special=True) == ids, repr(text)
        assert mine.decode(ids) == reference.decode(ids, skip_special_tokens=True), repr(text)
        assert mine.decode(ids, skip_special=False) == reference.decode(ids, skip_special_tokens=False), repr(text)
        literal = mine.encode(text, add_special=False)
        assert not mine.control_ids.difference(unknown(mine)).intersection(literal), repr(text)
        if not any(name in text for name in mine.control_literals):
            assert literal == mine.encode(text, add_special=False, parse_special=True), repr(text)


def unknown(mine: Tokenizer) -> list[int]:
    return [i for name, i in mine.control_literals.items() if name == mine.special_tokens.get("unk_token")]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", DIRECTORIES)
def test_tokenizer_json(kind: str, count: int, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write_directory(tmp_path, DIRECTORIES[kind]())
    reference = AutoTokenizer.from_pretrained(path)
    same(Tokenizer.from_directory(path), reference, count)


def wrap(backend: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def as_read(path: Path) -> Any:
    """What transformers makes of a GGUF file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def composed(path: Path) -> Any:
    """transformers forgets that Qwen's own tokenizer composes characters first."""
    reference = as_read(path)
    reference._tokenizer.normalizer = normalizers.NFC()
    return reference


def digits_first(path: Path) -> Any:
    """transformers forgets that SmolLM's own tokenizer cuts out digits first."""
    reference = as_read(path)
    reference._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return reference


def whole_pieces(path: Path) -> Any:
    """transformers forgets that Llama 3's own tokenizer looks whole pieces up before it merges."""
    reference = as_read(path)
    reference._tokenizer.model.ignore_merges = True
    return reference


def as_directory(_: Path) -> Any:
    """transformers forgets that Phi-3's own tokenizer drops whitespace after control tokens."""
    return wrap(phi3_backend())


GGUFS: dict[str, Callable[[Path], Any]] = {
    "llama": as_read,
    "gemma3": as_read,
    "phi3": as_directory,
    "gpt-2": as_read,
    "gpt-4o": as_read,
    "qwen2": composed,
    "smollm": digits_first,
    "llama-bpe": whole_pieces,
    "tekken": whole_pieces,
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", GGUFS)
def test_gguf(kind: str, count: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_metadata(kind))
    same(Tokenizer.from_gguf(GGUFFile(path).metadata), GGUFS[kind](path), count)


def without_user_defined() -> Pieces:
    pieces = sentencepiece()
    return replace(pieces, types=[NORMAL if kind == USER_DEFINED else kind for kind in pieces.types])


MODELS: dict[str, Callable[[], SimpleNamespace]] = {
    "bpe": lambda: spec(sentencepiece(), 2),
    "bpe, no prefix": lambda: spec(without_user_defined(), 2, prefix=False),
    "bpe, squeezed": lambda: spec(sentencepiece(), 2, squeeze=True),
    "unigram": lambda: spec(unigram(), 1, squeeze=True),
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_tokenizer_model(kind: str, legacy: bool, count: int, tmp_path: Path) -> None:
    from transformers.convert_slow_tokenizer import SpmConverter

    model = MODELS[kind]()
    (tmp_path / "tokenizer.model").write_bytes(serialized(model))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "legacy": legacy}))
    vocab: Any = {piece.piece: index for index, piece in enumerate(model.pieces)}
    if model.trainer_spec.model_type == 1:
        vocab = [(piece.piece, piece.score) for piece in model.pieces]
    backend = SpmConverter.build_tokenizer_from_spm_proto(model, vocab, legacy=legacy)
    controls = [piece.piece for piece in model.pieces if piece.type == CONTROL]
    with_added(backend, controls, [CONTROL] * len(controls))
    # Beside user-defined pieces, transformers takes a part that is just <0xF0> for that byte; SentencePiece does not.
    same(Tokenizer.from_directory(tmp_path), wrap(backend), count, skip=r"<0x\w\w>")


def made_up(kind: str) -> Pieces:
    """Pieces of which text can make the literals of control and byte tokens."""
    pieces = Pieces()
    for token, kind_of in [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]:
        pieces.add(token, kind_of)
    if kind == "bpe":
        for byte in range(256):
            pieces.add(f"<0x{byte:02X}>", BYTE)
    for token in ("<s", "</", "</s", "s>", "<0", "x41>", "<0x41", "▁<", *"▁<>/s0x41ab"):
        pieces.add(token, score=-1.0 - len(pieces.tokens) / 100)
    return pieces


MADE_UP = [("bpe", "gguf"), *((kind, form) for kind in ("bpe", "unigram") for form in ("json", "model", "isolated"))]


@pytest.mark.parametrize("text", ["<s>", "a<s>b", "a </s>", "<0x41>", "<s><s> <0x41></s>", "<unk>"])
@pytest.mark.parametrize(("kind", "form"), MADE_UP)
def test_no_text_becomes_a_control_token(kind: str, form: str, text: str, tmp_path: Path) -> None:
    """Even where the pieces of a vocabulary would make one up. isolated: with a user-defined piece."""
    pieces = made_up(kind)
    if form == "gguf":
        metadata = {"model": "llama", "tokens": pieces.tokens, "scores": pieces.scores, "token_type": pieces.types}
        mine = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    else:
        if form == "isolated":
            pieces.add("<think>", USER_DEFINED)
        if form == "json":
            write_directory(tmp_path, naive_backend(pieces, kind))
        else:
            model = spec(pieces, 2 if kind == "bpe" else 1, prefix=False)
            (tmp_path / "tokenizer.model").write_bytes(serialized(model))
        mine = Tokenizer.from_directory(tmp_path)
    ids = mine.encode(text, add_special=False)
    assert not {1, 2}.intersection(ids)
    assert "<0x41>" not in map(mine.token_piece, ids)
    if text != "<unk>":
        assert mine.decode(ids) == text
    mixed = mine.encode_parts(["a", 1, text, 2])
    assert [index for index in mixed if index in {1, 2}] == [1, 2]


def naive_backend(pieces: Pieces, kind: str) -> Any:
    """As a file may be: its merges, or its scores, prefer the control tokens."""
    if kind == "unigram":
        scored = [(t, 0.0 if k == CONTROL else s) for t, s, k in zip(pieces.tokens, pieces.scores, pieces.types)]  # noqa: B905
        backend = hf.Tokenizer(models.Unigram(scored, unk_id=0))
    else:
        vocab = {token: index for index, token in enumerate(pieces.tokens)}
        merges = [("<", "s"), ("<s", ">"), ("<", "/"), ("</", "s"), ("</s", ">")]
        backend = hf.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return with_added(backend, pieces.tokens, pieces.types)


def test_a_tokenizer_model_says_what_it_begins_with(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(serialized(spec(sentencepiece(), 2)))
    mine = Tokenizer.from_directory(tmp_path)
    assert (mine.encode(""), mine.bos_id, mine.eos_ids) == ([1], 1, {2})
    assert mine.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"add_bos_token": None, "add_eos_token": True, "eos_token": "<|im_end|>", "chat_template": "T"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    mine = Tokenizer.from_directory(tmp_path)
    end = sentencepiece().tokens.index("<|im_end|>")
    assert (mine.encode(""), mine.eos_ids, mine.chat_template) == ([1, end], {end}, "T")


def test_tokens_added_beside_a_tokenizer_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(serialized(spec(sentencepiece(), 2)))
    size = len(sentencepiece().tokens)
    added = tmp_path / "added_tokens.json"
    added.write_text(json.dumps({"<b>": size + 1, "<a>": size}))
    config = {"added_tokens_decoder": {str(size): {"content": "<a>", "special": True, "normalized": False}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    mine = Tokenizer.from_directory(tmp_path)
    assert mine.encode("<a><b>", add_special=False, parse_special=True) == [size, size + 1]
    assert mine.encode("<b>", add_special=False) == [size + 1]
    assert mine.control_literals["<a>"] == size
    added.write_text(json.dumps({"<a>": size + 7}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InputError, match=rf"added_tokens\.json.*'<a>' is {size + 7}; expected {size}"):
        Tokenizer.from_directory(tmp_path)


def test_a_damaged_tokenizer_model_is_named(tmp_path: Path) -> None:
    whole = serialized(spec(sentencepiece(), 2))
    rng = random.Random(0)
    tiktoken = b"".join(base64.b64encode(bytes([b])) + b" %d\n" % b for b in range(256))
    damaged = [
        b"",
        b"\x0a",
        b"{}",
        tiktoken,
        rng.randbytes(999),
        *(whole[: rng.randrange(len(whole))] for _ in range(99)),
    ]
    for data in damaged:
        (tmp_path / "tokenizer.model").write_bytes(data)
        with pytest.raises(InputError, match=r"tokenizer\.model: not a SentencePiece model; .*tokenizer\.json"):
            Tokenizer.from_directory(tmp_path)
    for change in ({"model_type": 3}, {"model_type": 4}):
        model = spec(sentencepiece(), 2)
        vars(model.trainer_spec).update(change)
        (tmp_path / "tokenizer.model").write_bytes(serialized(model))
        with pytest.raises(InputError, match=r"tokenizer\.model: .*only BPE and Unigram"):
            Tokenizer.from_directory(tmp_path)


def small_llama(**changes: Any) -> Tokenizer:
    metadata = gguf_metadata("llama")
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Tokenizer.from_gguf({key: value for key, value in metadata.items() if value is not None})


def test_sentencepiece_in_gguf_begins_with_bos_unless_told_otherwise() -> None:
    assert small_llama(add_bos_token=None).encode("") == [1]
    assert small_llama(add_bos_token=False).encode("") == []
    assert small_llama(add_eos_token=True).encode("") == [1, 2]
    unnamed = small_llama(bos_token_id=None, eos_token_id=None, unknown_token_id=None)
    assert (unnamed.encode(""), unnamed.special_tokens["unk_token"]) == ([1], "<unk>")
    assert 2 in unnamed.eos_ids


def test_no_space_before_a_text() -> None:
    plain, spaced = small_llama(add_space_prefix=False), small_llama()
    assert plain.encode("▁the") == spaced.encode("the")
    assert plain.encode("the") != spaced.encode("the")
    assert plain.decode(plain.encode(" the")) == " the"
    assert spaced.decode(spaced.encode("the")) == "the"


def test_merges_of_the_file_are_taken() -> None:
    mine = small_llama(merges=["t h"])
    assert [mine.token_piece(i) for i in mine.encode("the", add_special=False)] == ["▁", "th", "e"]


def test_gemma_spells_runs_of_spaces_as_they_are() -> None:
    mine = Tokenizer.from_gguf(gguf_metadata("gemma3"))
    ids = mine.encode("a   b", add_special=False)
    assert mine.decode(ids) == "a   b"
    assert any(set(mine.token_piece(index) or "") == {"▁"} for index in ids)
    assert "\n\n" in map(mine.token_piece, mine.encode("a\n\nb"))
