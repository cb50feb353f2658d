"""LLM: the Python interface, in the shape of vLLM's."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any

from serried.config import EngineConfig
from serried.engine.core import EngineCore, NewToken
from serried.engine.executor import Executor, create_executor
from serried.engine.outputs import Answer, Delta, RequestOutput
from serried.engine.scheduler import Scheduler
from serried.errors import InputError
from serried.models.registry import ModelSource, open_model
from serried.progress import progress_bar
from serried.sampling_params import SamplingParams
from serried.text.chat import encode_chat
from serried.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class LLM:
    """A model, split over ranks, that answers prompts.

    model: a Hugging Face directory, a .gguf file, `demo`, or a preset's name with load_format="dummy". options: the
    fields of EngineConfig. Raises InputError for what cannot work and RankFailed where a rank does not come up.
    Under torchrun every rank makes the same LLM and the same calls; rank 0 gets the answers, the others empty lists.
    """

    def __init__(self, model: str, tensor_parallel_size: int | None = None, **options: Any) -> None:
        if tensor_parallel_size is not None:
            options["tensor_parallel_size"] = tensor_parallel_size
        config = EngineConfig.create(model, **options)
        self.source: ModelSource = open_model(config.model)
        with progress_bar(f"loading {self.source.name}") as progress:
            self.executor: Executor = create_executor(config, self.source, progress)
        self.config = self.executor.config
        scheduler = Scheduler(
            self.executor.new_pool(),
            block_size=self.config.block_size,
            max_model_len=self.executor.max_model_len,
            max_requests=self.config.max_num_seqs,
            token_budget=self.config.max_num_batched_tokens,
        )
        self._arrived: dict[int, deque[NewToken]] = {}  # by request: tokens that its stream has not taken yet
        self.core = EngineCore(
            self.executor,
            scheduler,
            vocab_size=self.source.config.vocab_size,
            eos_ids=sorted({*self.source.config.eos_ids, *(self.tokenizer.eos_ids if self.tokenizer else ())}),
        )

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None for a preset."""
        if self.source.gguf is not None:
            return Tokenizer.from_gguf(self.source.gguf.metadata)
        if self.source.directory is not None and (self.source.directory / "tokenizer.json").is_file():
            return Tokenizer.from_directory(self.source.directory)
        return None

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Answer one prompt or many: text, or token ids. The answers are in the order of the prompts."""
        many = as_prompts(prompts)
        outputs: dict[int, RequestOutput] = {}
        with progress_bar("generating", unit="prompts") as progress:
            for delta in self.stream(many, sampling_params):
                outputs[delta.index] = delta.output
                if progress and delta.output.finished:
                    progress(sum(output.finished for output in outputs.values()), len(many))
        return [outputs[index] for index in sorted(outputs)]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, rendered by the model's chat template."""
        many = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        return self.generate([self.encode_chat(m, **template) for m in many], sampling_params)

    def encode_chat(self, messages: Any, **template: Any) -> list[int]:
        """The token ids of a conversation, with the opening of the answer."""
        return encode_chat(self._need_tokenizer(), messages, **template)

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """As generate, piece by piece as the tokens come."""
        params = sampling_params or SamplingParams()
        if not self.executor.decides:
            self.executor.follow()
            return
        live = self._add_all(as_prompts(prompts), params)
        try:
            while live:
                self._advance(live)
                yield from self._take(live)
        finally:
            self._abort(live)
            self.executor.pause()

    def close(self) -> None:
        """Stop the ranks. An LLM that is garbage collected, or whose process ends, does so by itself."""
        self.executor.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(f"{self.source.name}: has no tokenizer, so it cannot take text; give token ids")
        return self.tokenizer

    def _add_all(self, prompts: Sequence[Prompt], params: SamplingParams) -> dict[int, Answer]:
        encoded = [self._need_tokenizer().encode(p) if isinstance(p, str) else list(p) for p in prompts]
        if params.stop:
            self._need_tokenizer()  # stop strings are text
        live: dict[int, Answer] = {}
        try:
            for index, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
                request = self.core.add(ids, params)
                text = prompt if isinstance(prompt, str) else None
                live[request.id] = Answer(index, request, text, self.tokenizer)
                self._arrived[request.id] = deque()
        except InputError:
            self._abort(live)
            raise
        return live

    def _advance(self, live: Collection[int]) -> None:
        """Run a step, unless one that another stream ran has left tokens for the requests in `live`."""
        if not any(self._arrived[id] for id in live):
            for new in self.core.step():
                self._arrived[new.request.id].append(new)

    def _take(self, live: dict[int, Answer]) -> Iterator[Delta]:
        """What has arrived for the requests in `live`, from which those that are finished are taken out."""
        for id, answer in list(live.items()):
            while id in live and self._arrived[id]:
                delta = answer.take(self._arrived[id].popleft())
                if delta.output.finished:
                    self._drop(live, id, "stop")
                yield delta

    def _abort(self, live: dict[int, Answer]) -> None:
        for id in list(live):
            self._drop(live, id, "abort")

    def _drop(self, live: dict[int, Answer], id: int, reason: str) -> None:
        self.core.finish(live.pop(id).request, reason)
        del self._arrived[id]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a string, or token ids) or many, as a list."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
