"""The vocabulary of a GGUF file: its tokens, their types, BOS and EOS, as llama.cpp's keys give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from serried.errors import InputError
from serried.text.byte_level import PRE_TOKENIZERS, STARTS_WITH_BOS, byte_level_backend
from serried.text.sentencepiece import SPACE, Pieces, Rules, bpe_backend
from serried.text.vocabulary import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary

if TYPE_CHECKING:
    import tokenizers

_KINDS: Final = ("gpt2", "llama")  # tokenizer.ggml.model: byte-level BPE, SentencePiece BPE
# GGUF names one end token, chat models have several; llama.cpp finds the others by these names.
_END_NAMES: Final = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>",
    "<EOT>", "_<EOT>", "</s>", "<eos>", "<turn|>", "<|return|>", "<|call|>", "<｜end▁of▁sentence｜>",
}  # fmt: skip
_NAMED: Final = ("bos", "eos", "eot", "eom", "unknown", "padding")
_SENTENCEPIECE_IDS: Final = {"bos": 1, "eos": 2, "unknown": 0}  # where a file names none
# Phi-3's own tokenizer drops whitespace after control tokens other than these.
_PHI3_KEEPS: Final = {"<unk>", "<s>", "<|endoftext|>"}


def gguf_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Byte-level BPE or SentencePiece BPE out of GGUF metadata; another kind, or damage -> InputError with the key."""
    model = metadata.get("tokenizer.ggml.model")
    if model not in _KINDS:
        raise InputError(
            f"tokenizer.ggml.model is {model!r}: from GGUF only 'gpt2' (byte-level BPE) and 'llama' (SentencePiece "
            "BPE) are read"
        )
    tokens, types = _tokens(metadata)
    ids = _named_ids(metadata, model, types)
    for name in ("bos", "eos", "eot", "eom"):  # control tokens, whatever their type says
        if name in ids:
            types[ids[name]] = CONTROL
    for name in ("unknown", "padding"):
        if name in ids and types[ids[name]] not in {NORMAL, USER_DEFINED}:
            types[ids[name]] = CONTROL
    build = _sentencepiece if model == "llama" else _byte_level
    backend = build(metadata, tokens, types, ids.get("unknown"))
    _add_tokens(backend, tokens, types, is_phi3=metadata.get("general.architecture") == "phi3" and model == "llama")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", model == "llama" or pre in STARTS_WITH_BOS)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    named_ends = {i for i, kind in enumerate(types) if kind == CONTROL and tokens[i] in _END_NAMES}
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    template = metadata.get("tokenizer.chat_template")
    return Vocabulary(
        backend,
        frame=([ids["bos"]] if add_bos and "bos" in ids else [], [ids["eos"]] if add_eos and "eos" in ids else []),
        bos_id=ids.get("bos"),
        eos_ids=frozenset(named_ends | {ids[name] for name in ("eos", "eot", "eom") if name in ids}),
        special_tokens={names[name]: tokens[index] for name, index in ids.items() if name in names},
        chat_template=template if isinstance(template, str) else None,
    )


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Tokens and their types; missing -> InputError."""
    tokens = list(map(str, _needed(metadata, "tokenizer.ggml.tokens")))
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())] or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise InputError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    return tokens, types


def _needed(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise InputError(f"{key} is missing from the GGUF file: no tokenizer without it")
    return metadata[key]


def _named_ids(metadata: Mapping[str, Any], model: str, types: list[int]) -> dict[str, int]:
    """The ids of BOS, EOS and so on; one that does not exist -> InputError."""
    usual = _SENTENCEPIECE_IDS if model == "llama" else {}
    ids = {name: index for name, index in usual.items() if types[index : index + 1] in ([CONTROL], [UNKNOWN])}
    for name in _NAMED:
        key = f"tokenizer.ggml.{name}_token_id"
        if key in metadata:
            ids[name] = int(metadata[key])
            if not 0 <= ids[name] < len(types):
                raise InputError(f"{key} is {ids[name]}, but there are {len(types)} tokens")
    return ids


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    # The first character may be a space: the left part is never empty.
    cuts = ((merge, merge.index(" ", 1)) for merge in map(str, _needed(metadata, "tokenizer.ggml.merges")))
    try:
        return [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts]
    except ValueError:
        raise InputError("tokenizer.ggml.merges has an entry that is not two tokens with a space between") from None


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], unknown: int | None
) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise InputError(f"tokenizer.ggml.pre is {pre!r}: known are {', '.join(sorted(PRE_TOKENIZERS))}")
    # tokenizer.ggml.add_space_prefix is for SentencePiece; llama.cpp ignores it here too.
    return byte_level_backend(tokens, _merges(metadata), pre)


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], unknown: int | None
) -> tokenizers.Tokenizer:
    """GGUF does not say how the original put a space before a text: its architecture does, as in transformers."""
    architecture = str(metadata.get("general.architecture"))
    scores = list(map(float, metadata.get("tokenizer.ggml.scores", ())))
    if architecture.startswith("gemma"):
        _respell_spaces(tokens, types)
        scores = [-float(index) for index in range(len(tokens))]  # its scores do not follow its merges
    if len(scores) != len(tokens):
        raise InputError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    spaced = metadata.get("tokenizer.ggml.add_space_prefix", not architecture.startswith("gemma"))
    prefix = "never" if not spaced else "always" if architecture == "phi3" else "first"
    merges = _merges(metadata) if "tokenizer.ggml.merges" in metadata else None
    return bpe_backend(Pieces(tokens, scores, types, unknown), Rules(prefix), merges)


def _respell_spaces(tokens: list[str], types: list[int]) -> None:
    """Gemma's files write a run of spaces as it is; its vocabulary, like every other, as so many underlines."""
    known = set(tokens)
    for index, token in enumerate(tokens):
        run = SPACE * len(token)
        if token and not token.strip(" ") and run not in known:
            tokens[index], types[index] = run, NORMAL


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int], *, is_phi3: bool) -> None:
    """Tell the backend which tokens are cut out of a text whole: control and user-defined ones."""
    import tokenizers as hf

    added = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in {CONTROL, USER_DEFINED} and token:
            strips = is_phi3 and token not in _PHI3_KEEPS
            added.append(hf.AddedToken(token, normalized=False, special=kind == CONTROL, rstrip=strips))
    backend.add_tokens(added)
