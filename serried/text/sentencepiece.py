"""SentencePiece vocabularies, for the `tokenizers` library: pieces with scores become merges."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from serried.errors import InputError
from serried.text.vocabulary import MERGED

if TYPE_CHECKING:
    import tokenizers

SPACE: Final = "▁"  # how pieces spell a space


class Pieces(NamedTuple):
    """What SentencePiece has learnt: each piece with its score and its type. unknown: the id of <unk>."""

    tokens: list[str]
    scores: Sequence[float]
    types: Sequence[int]
    unknown: int | None = None


class Rules(NamedTuple):
    """What happens to a text before it becomes pieces.

    prefix: whether a space is put before it: `never`; `first`, where it does not begin with one; or `always`, after
    each control token too. charsmap: SentencePiece's compiled normalization. squeeze: runs of spaces become one, and
    those at the ends go. isolated: pieces that are cut out whole.
    """

    prefix: str
    byte_fallback: bool = True
    charsmap: bytes = b""
    squeeze: bool = False
    isolated: Sequence[str] = ()


def merges_of(pieces: Pieces) -> list[tuple[str, str]]:
    """The merges that pieces imply, the best score first: any two of them that make a third.

    Control, unknown and byte pieces take no part, so that no text becomes one. Equal scores are ordered as
    transformers orders them: the longer left part, then the longer right part first.
    """
    tokens, scores, types, _ = pieces
    usable = {token for token, kind in zip(tokens, types, strict=True) if kind in MERGED}
    ranked = sorted((i for i, kind in enumerate(types) if kind in MERGED), key=lambda i: -scores[i])
    merges: list[tuple[str, str]] = []
    for _, group in groupby(ranked, key=scores.__getitem__):
        start, makers = len(merges), 0
        for index in group:
            token, before = tokens[index], len(merges)
            for cut in range(len(token) - 1, 0, -1):
                if (left := token[:cut]) in usable and (right := token[cut:]) in usable:
                    merges.append((left, right))
            makers += len(merges) > before
        if makers > 1:
            merges[start:] = sorted(merges[start:], key=lambda pair: (-len(pair[0]), -len(pair[1])))
    return merges


def bpe_backend(pieces: Pieces, rules: Rules, merges: list[tuple[str, str]] | None = None) -> tokenizers.Tokenizer:
    """A BPE backend without added tokens; without merges, those that the scores imply.

    Merges that do not fit the pieces -> InputError.
    """
    from tokenizers import models

    try:
        model = models.BPE(
            vocab={token: index for index, token in enumerate(pieces.tokens)},
            merges=merges_of(pieces) if merges is None else merges,
            unk_token=None if pieces.unknown is None else pieces.tokens[pieces.unknown],
            fuse_unk=True,
            byte_fallback=rules.byte_fallback,
            ignore_merges=bool(rules.isolated),
        )
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"the merges of the tokenizer do not fit its tokens: {error}") from None
    return _assembled(model, rules)


def unigram_backend(pieces: Pieces, rules: Rules) -> tokenizers.Tokenizer:
    """A Unigram backend without added tokens; pieces that it cannot use -> InputError."""
    from tokenizers import models

    worst = min((s for s, kind in zip(pieces.scores, pieces.types, strict=True) if kind in MERGED), default=0.0)
    # The library would read the literals <s> and <0x41> in a text as the pieces of that name; a score below that of
    # their characters keeps it from that.
    scored = [
        (token, (len(token) + 1) * worst if kind not in MERGED else float(score))
        for token, score, kind in zip(*pieces[:3], strict=True)
    ]
    try:
        model = models.Unigram(scored, unk_id=pieces.unknown, byte_fallback=rules.byte_fallback)
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"the pieces of the tokenizer are not a Unigram vocabulary: {error}") from None
    return _assembled(model, rules)


def _assembled(model: tokenizers.models.Model, rules: Rules) -> tokenizers.Tokenizer:
    """A model with what comes before and after it; it gets a text as one piece, spaces and all."""
    import tokenizers as hf
    from tokenizers import decoders, normalizers, pre_tokenizers

    backend = hf.Tokenizer(model)
    before: list[normalizers.Normalizer] = []
    if rules.charsmap:
        before.append(normalizers.Precompiled(rules.charsmap))
    if rules.squeeze:  # of whitespace only spaces count
        before += [normalizers.Replace(hf.Regex(r"\A +| +\z"), ""), normalizers.Replace(hf.Regex(" {2,}"), " ")]
    if rules.prefix == "always":
        before.append(normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    cuts: list[pre_tokenizers.PreTokenizer] = []
    if rules.prefix == "first":
        cuts.append(pre_tokenizers.Metaspace(prepend_scheme="first", split=False))
    if rules.isolated:
        names = sorted(rules.isolated, key=len, reverse=True)
        cuts.append(pre_tokenizers.Split(hf.Regex("|".join(map(re.escape, names))), "isolated"))
        # BPE now looks whole pieces up, and must not find the byte <0x41> where the text is just that.
        cuts.append(pre_tokenizers.Split(hf.Regex(r"\A<(?=0x[0-9A-F]{2}>\z)"), "isolated"))
    if cuts:
        backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    after: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    if rules.byte_fallback:
        after.append(decoders.ByteFallback())
    after.append(decoders.Fuse())
    if rules.prefix != "never":
        after.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(after)
    return backend
