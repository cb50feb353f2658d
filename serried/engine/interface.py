"""AsyncEngine: what the server asks of an engine, wherever that runs. Plain data, which msgspec can carry.

Token ids go in and come out: text is the front end's work, and so are stop strings. A front end that has found one in
a sample ends that sample by `abort(request_id, index)`; closing the iterator of `generate` ends the whole request. Both
free the request's cache blocks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from serried.sampling_params import SamplingParams
from serried.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]


@dataclass(frozen=True)
class ModelInfo:
    """The model that an engine runs.

    max_model_len: the longest sequence, prompt and output together, in tokens. defaults: what generation_config.json
    says of sampling, by the names of SamplingParams (temperature, top_k, top_p, min_p, repetition_penalty,
    max_tokens); the server uses them where a request says nothing.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int] = frozenset()
    defaults: Mapping[str, float] = field(default_factory=dict)
    tensor_parallel_size: int = 1
    max_num_seqs: int = 64


@dataclass(frozen=True)
class GrammarSpec:
    """What the output must match, as text: the matcher is made where the engine runs (text/structured.py).

    json_schema: a schema as JSON. json_object: any object (text is empty). regex: a regular expression over the whole
    output. choice: a JSON list of strings. lark: a grammar in llguidance's syntax, which only the server itself
    writes. reasoning: the tags around the reasoning that may come before, in which everything is free; the first one
    is empty where the prompt has opened it already; None where all must match.
    """

    kind: GrammarKind
    text: str
    reasoning: tuple[str, str] | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probabilities at one position: of its token, then of the likeliest tokens besides it, best first.

    ranks: 1 for the likeliest; one more than there are tokens with a larger logit.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class TokenDelta:
    """New tokens of one sample of a request.

    index: which of the params' `n` samples. logprobs: one for each token, None where not asked for. prompt_logprobs:
    with the first delta of a request that asks for them: one for each token of the prompt, None for the first.
    finish_reason: with a sample's last delta; what ended it is in stop_reason (a token of stop_token_ids, or why it
    was aborted). The last token is in tokens even where it is an end token.
    """

    index: int = 0
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0  # of the prompt, found in the prefix cache


@dataclass(frozen=True)
class RankStats:
    """What a rank has done with its time since the engine started, in seconds."""

    rank: int
    compute: float
    collective: float
    idle: float


@dataclass(frozen=True)
class EngineStats:
    """How the engine is doing. running, waiting and blocks_used are of now; all others count from its start.

    prefix_queries, prefix_hits: tokens of prompts, and those of them found in the prefix cache. step_seconds: spent
    in all steps together.
    """

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    restarts: int = 0
    ranks: Sequence[RankStats] = ()


class AsyncEngine(Protocol):
    """An engine as the server sees it.

    tokenizer: None where the model has none (only token ids go in then). failure: why the engine is down for good;
    None while it runs, and while it is being restarted.
    """

    model: ModelInfo
    tokenizer: Tokenizer | None

    @property
    def failure(self) -> str | None: ...

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        grammar: GrammarSpec | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """The tokens of all `n` samples as they come; ends when the last sample has ended.

        request_id: unique among the requests that run. priority: lower runs first. cache_salt: prefixes are shared
        only among requests of the same salt. Raises, before the first delta, InputError (the parameter comes first:
        "top_k: ..."), QueueFull or EngineDead; afterwards EngineDead alone.
        """
        ...

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sample of it, and free its blocks; no more deltas of it come. Unknown ids are fine."""
        ...

    def stats(self) -> EngineStats:
        """The latest figures; it does not wait for anything."""
        ...

    async def check_ready(self) -> None:
        """Returns when a forward through all ranks has succeeded lately; raises EngineDead where it has not."""
        ...

    async def close(self) -> None:
        """Stop the engine and its ranks; requests in flight end with EngineDead."""
        ...
