"""Structured output: which tokens may come next, so that the whole matches a JSON schema, a regex or a list of choices.

llguidance does the work. What it cannot enforce to the letter it refuses, and so do we: nothing is ever served
unconstrained in its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from serried.errors import InputError
from serried.text.tokenizer import Tokenizer, check_text

if TYPE_CHECKING:
    pass

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark"]
MAX_TEXT: Final = 256 * 1024  # characters of a schema or a regex
MAX_DEPTH: Final = 64  # of nested JSON in a schema
# Fuel, not seconds, so that what is refused does not depend on the load. Together they keep the slowest compilation
# near a second and the slowest mask near 20 ms.
_LIMITS: Final = {"initial_lexer_fuel": 200_000, "max_grammar_size": 200_000, "verbose_errors": False}


class Spec(Protocol):
    """What an output must match: engine/interface.py's GrammarSpec."""

    @property
    def kind(self) -> Kind: ...
    @property
    def text(self) -> str: ...
    @property
    def reasoning(self) -> tuple[str, str] | None: ...


class GrammarVocabulary:
    """A tokenizer's vocabulary as llguidance wants it: made once for a model (a third of a second for 50,000 tokens).

    size: of the model's vocabulary, which may be larger than the tokenizer's; what is beyond is never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: Iterable[int]) -> None:
        import llguidance

        self.size = size
        wrapper = llguidance.TokenizerWrapper(_Spelling(tokenizer, size, sorted(eos_ids)))
        self.tokens = llguidance.LLTokenizer(wrapper, eos_token=sorted(eos_ids))
        self.limits = llguidance.LLParserLimits(**_LIMITS)  # type: ignore[arg-type]

    def compile(self, spec: Spec) -> Grammar:
        """A matcher at its beginning; InputError where the grammar is malformed, unsupported, empty or too large.

        It may take a second: keep it off an event loop.
        """
        grammar = Grammar(self, grammar_text(spec))
        grammar.mask()
        grammar.check()
        return grammar


class Grammar:
    """One output's way through a grammar: `mask` before each token, `accept` after it."""

    def __init__(self, vocabulary: GrammarVocabulary, text: str) -> None:
        import llguidance

        self._words = (vocabulary.size + 31) // 32
        self._matcher = llguidance.LLMatcher(vocabulary.tokens, text, log_level=0, limits=vocabulary.limits)
        self.check()

    def mask(self) -> npt.NDArray[np.int32]:
        """Which tokens may come next: int32 [vocabulary / 32], token t is bit t % 32 of word t // 32.

        An end token is allowed where the output may end; nothing is where the grammar has turned out to be too complex,
        which may be after many tokens.
        """
        words = np.zeros(self._words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            words[:] = 0
        return words

    def accept(self, token: int) -> bool:
        """Take the token that was chosen; False (and no more masks) where it does not fit."""
        return self._matcher.consume_token(token)

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token can follow."""
        return self._matcher.is_stopped()

    def check(self) -> None:
        """InputError where it cannot be enforced."""
        if self._matcher.is_error():
            raise InputError(f"this grammar cannot be enforced: {_reason(self._matcher.get_error())}")


class _Spelling:
    """What llguidance asks of a tokenizer: the bytes of every token, and the ids of a text."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0] if eos_ids else None
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self.special_token_ids = sorted(token for token in tokenizer.control_ids if token < size)

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(), add_special=False)


def grammar_text(spec: Spec) -> str:
    """A spec in llguidance's own syntax."""
    body = {**_body(spec), "name": "body"}
    if spec.reasoning is None:
        return json.dumps({"grammars": [body]})
    opening, closing = (json.dumps(tag, ensure_ascii=False) for tag in spec.reasoning)
    # Where the prompt has opened the reasoning already (the tag is empty), it must be closed.
    start = "start: free SPACE? @body" if spec.reasoning[0] == "" else f"start: ({opening} free)? SPACE? @body"
    lark = f"{start}\nfree[suffix={closing}]: /(.|\\n)*/\nSPACE: /[ \\n]{{1,4}}/\n"
    return json.dumps({"grammars": [{"lark_grammar": lark}, body]})


def _body(spec: Spec) -> dict[str, Any]:
    if len(spec.text) > MAX_TEXT:
        raise InputError(f"a grammar of {len(spec.text)} characters: at most {MAX_TEXT} are allowed")
    match spec.kind:
        case "json_object":
            return {"json_schema": {"type": "object"}}
        case "json_schema":
            return {"json_schema": _schema(spec.text)}
        case "regex":
            return {"lark_grammar": _regex(spec.text)}
        case "choice":
            return {"lark_grammar": _choice(spec.text)}
        case "lark":
            return {"lark_grammar": spec.text}


def _schema(text: str) -> dict[str, Any]:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise InputError(f"a JSON schema must be an object, not {type(schema).__name__}")
    if _depth(schema) > MAX_DEPTH:
        raise InputError(f"a JSON schema may be nested {MAX_DEPTH} levels deep")
    # llguidance takes options from this key, one of which ignores what it does not know.
    return {key: value for key, value in schema.items() if key != "x-guidance"}


def _regex(text: str) -> str:
    import llguidance

    check_text(text, "the regex")
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise InputError("this regex ends in half an escape: a single backslash")  # it would be dropped
    return f"start: /{llguidance.regex_to_lark(text, use_ascii='')}/" if text else 'start: ""'


def _choice(text: str) -> str:
    choices = json.loads(text)
    if not choices or not all(isinstance(choice, str) for choice in choices):
        raise InputError("choices must be a list of at least one string")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _depth(value: Any) -> int:
    """How deep JSON data is nested; it never recurses deeper than the limit."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        children = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
        level = [item for item in children if isinstance(item, dict | list)]
        depth += 1
    return depth


def _reason(error: str) -> str:
    """llguidance's message on one line."""
    text = " ".join(error.removesuffix("<non-verbose/>").split())
    if text.startswith("NoExtension"):
        return "no text matches it"
    return text if len(text) <= 300 else text[:297] + "..."
