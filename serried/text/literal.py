"""The encoder for text that is not ours: control tokens' literals stay text, and stand-ins say where one is meant."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers


class LiteralEncoder:
    """A twin of a backend that knows no control token, but a secret name for each.

    Nobody can guess the names, so no text of a user can hold one. A twin, not a switch: changing the backend while
    another thread uses it raises. It shares the model, and so the vocabulary, unless it is `strict`: then the control
    tokens are gone from the model too.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        control: Mapping[str, int],
        exempt: Collection[str] = (),
        *,
        strict: bool = False,
    ) -> None:
        """control: literals and ids of the control tokens. exempt: those that any text may become: the unknown one."""
        import tokenizers as hf

        nonce = secrets.token_hex(16)
        self._names = {index: f"\ue000{nonce}:{index}\ue001" for index in control.values()}
        guarded = {text: self._names[index] for text, index in control.items() if text not in exempt}
        twin = self._twin = hf.Tokenizer(_without(backend, guarded) if strict else backend.model)
        for name in ("normalizer", "pre_tokenizer"):
            if (part := getattr(backend, name)) is not None:
                setattr(twin, name, part)
        # What text must not become, though the model could make it of the pieces that it is written in.
        self._forbidden = {index for text in guarded if (index := twin.token_to_id(text)) is not None}
        # An added token that the model lacks gets the next id by count, which is taken where the ids have gaps.
        vocab = backend.get_vocab(with_added_tokens=False)
        gaps = max(vocab.values(), default=-1) + 1 - len(vocab)
        added = {index: self._added(index, token) for index, token in backend.get_added_tokens_decoder().items()}
        fillers = [hf.AddedToken(f"\ue000{nonce}.{gap}", normalized=False) for gap in range(gaps)]
        twin.add_tokens([*fillers, *(added[index] for index in sorted(added))])
        numbers = ((twin.token_to_id(token.content), index) for index, token in added.items())
        self._renumber = {new: old for new, old in numbers if new is not None}

    def _added(self, index: int, token: tokenizers.AddedToken) -> tokenizers.AddedToken:
        """An added token as the twin has it: as it is, or its stand-in, which takes in the same whitespace."""
        import tokenizers as hf

        if index not in self._names:
            return token
        return hf.AddedToken(self._names[index], normalized=False, lstrip=token.lstrip, rstrip=token.rstrip)

    def encode(self, parts: Sequence[str | int]) -> list[int] | None:
        """Ids of strings and control ids; None where the model writes text as a control token (not if strict)."""
        text = "".join(self._names[part] if isinstance(part, int) else part for part in parts)
        ids = self._twin.encode(text, add_special_tokens=False).ids
        if self._forbidden.intersection(ids):
            return None
        return [self._renumber.get(index, index) for index in ids]


def _without(backend: tokenizers.Tokenizer, names: Mapping[str, str]) -> tokenizers.models.Model:
    """A copy of a backend's model in which tokens have other names, and no merge makes them."""
    import tokenizers as hf

    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): index for token, index in vocab.items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if "merges" in model:
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [[a, b] for a, b in pairs if not {a, b, a + b} & names.keys()]
    copy: tokenizers.models.Model = hf.Tokenizer.from_str(json.dumps({"version": "1.0", "model": model})).model
    return copy
