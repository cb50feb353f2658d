"""From a model and its ranks to an EngineCore: the same for LLM and for the engine's own process."""

from __future__ import annotations

from serried.engine.core import EngineCore
from serried.engine.executor import Executor
from serried.engine.scheduler import Scheduler
from serried.models.registry import ModelSource
from serried.text.directory import has_tokenizer
from serried.text.tokenizer import Tokenizer

NO_TOKENIZER = ("no_vocab", "none")  # what llama.cpp writes in the place of a tokenizer's kind
SCORE_BYTES = 64 << 20  # of logits that prompts may give log-probabilities of in one step


def load_tokenizer(source: ModelSource) -> Tokenizer | None:
    """The model's tokenizer; None where it has none, as a preset."""
    if source.gguf is not None:
        if source.gguf.metadata.get("tokenizer.ggml.model") in NO_TOKENIZER:
            return None
        return Tokenizer.from_gguf(source.gguf.metadata)
    if source.directory is not None and has_tokenizer(source.directory):
        return Tokenizer.from_directory(source.directory)
    return None


def end_tokens(source: ModelSource, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The tokens that end an answer, by what the model's files and its tokenizer say."""
    return frozenset({*source.config.eos_ids, *(tokenizer.eos_ids if tokenizer else ())})


def build_core(executor: Executor, source: ModelSource, tokenizer: Tokenizer | None) -> EngineCore:
    """A core over all blocks of the executor's cache, with the limits of its config."""
    config, vocab_size = executor.config, source.config.vocab_size
    scheduler = Scheduler(
        executor.new_pool(),
        block_size=config.block_size,
        max_model_len=executor.max_model_len,
        max_requests=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
        prefix_caching=config.enable_prefix_caching,
        score_budget=max(1, SCORE_BYTES // (4 * vocab_size)),
    )
    return EngineCore(executor, scheduler, vocab_size=vocab_size, eos_ids=sorted(end_tokens(source, tokenizer)))
