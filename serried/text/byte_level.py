"""Byte-level BPE vocabularies, for the `tokenizers` library: how each cuts text before its merges apply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from serried.errors import InputError

if TYPE_CHECKING:
    import tokenizers

# The names are llama.cpp's values of tokenizer.ggml.pre; every regex cuts what the one before it left.
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
_ENDING: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_HAN: Final = "[一-龥ࠀ-一가-퟿]+"
PRE_TOKENIZERS: Final[dict[str, tuple[str, ...]]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    "deepseek-v3": (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "gigachat", "mellum", "trillion"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "midm-2.0"), (_LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "kormo"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
}
# These look a whole piece of text up before they merge.
_WHOLE_PIECES: Final = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "midm-2.0", "tekken", "glm4"}
)
# And these start a sequence with BOS unless told otherwise.
STARTS_WITH_BOS: Final = _WHOLE_PIECES - {"glm4"}
# The original tokenizers of these compose characters first; GGUF does not say so.
_COMPOSED: Final = frozenset({"qwen2", "qwen35"})


def byte_level_backend(tokens: list[str], merges: list[tuple[str, str]], pre: str) -> tokenizers.Tokenizer:
    """A backend without added tokens; merges that do not fit the tokens -> InputError."""
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
    splits = [pre_tokenizers.Split(hf.Regex(regex), "isolated") for regex in PRE_TOKENIZERS[pre]]
    bytes_last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_last])
    backend.decoder = decoders.ByteLevel()
    return backend
