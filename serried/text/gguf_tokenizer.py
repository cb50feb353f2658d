"""Byte-level BPE vocabularies out of GGUF metadata, for the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from serried.errors import InputError

if TYPE_CHECKING:
    import tokenizers

# How each vocabulary cuts text before its merges apply. The names are llama.cpp's values of
# tokenizer.ggml.pre; every regex cuts what the one before it left.
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
_CONTROL, _USER_DEFINED = _ADDED = 3, 4


class Rebuilt(NamedTuple):
    """What Tokenizer is made of, by the names of its parameters."""

    backend: tokenizers.Tokenizer
    frame: tuple[list[int], list[int]]
    bos_id: int | None
    eos_ids: frozenset[int]
    special_tokens: dict[str, str]
    chat_template: str | None


def rebuild(metadata: Mapping[str, Any]) -> Rebuilt:
    """The vocabulary of a GGUF file; anything but byte-level BPE -> InputError naming the key."""
    tokens, types, merges, pre = _gguf_tokens(metadata)
    ids: dict[str, int] = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key in metadata:
            ids[name] = int(metadata[key])
            if not 0 <= ids[name] < len(tokens):
                raise InputError(f"{key} is {ids[name]}, but there are {len(tokens)} tokens")
            if name in ("bos", "eos", "eot", "eom"):  # control tokens, whatever their type says
                types[ids[name]] = _CONTROL
    named_ends = {i for i, kind in enumerate(types) if kind == _CONTROL and tokens[i] in _END_NAMES}
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", pre in _WHOLE_PIECES)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    template = metadata.get("tokenizer.chat_template")
    return Rebuilt(
        _gguf_backend(tokens, types, merges, pre),
        frame=([ids["bos"]] if add_bos and "bos" in ids else [], [ids["eos"]] if add_eos and "eos" in ids else []),
        bos_id=ids.get("bos"),
        eos_ids=frozenset(named_ends | {ids[name] for name in ("eos", "eot", "eom") if name in ids}),
        special_tokens={names[name]: tokens[index] for name, index in ids.items() if name in names},
        chat_template=template if isinstance(template, str) else None,
    )


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
    pairs = (str(merge).partition(" ") for merge in metadata["tokenizer.ggml.merges"])
    return tokens, types, [(left, right) for left, _, right in pairs], pre


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
    kinds = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in _ADDED and token]
    backend.add_tokens([hf.AddedToken(t, normalized=False, special=kind == _CONTROL) for t, kind in kinds])
    return backend
