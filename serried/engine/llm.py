"""LLM: the Python interface, in the shape of vLLM's."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any

from serried.config import EngineConfig
from serried.engine.build import build_core, load_tokenizer
from serried.engine.core import NewToken
from serried.engine.executor import Executor, create_executor
from serried.engine.outputs import Answer, Delta, RequestOutput
from serried.errors import InputError
from serried.models.registry import ModelSource, open_model
from serried.progress import Meter, progress_bar
from serried.sampling_params import SamplingParams
from serried.text.bad_words import spell_out
from serried.text.chat import encode_chat
from serried.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None  # one for all prompts, or one each


class LLM:
    """A model, split over ranks, that answers prompts.

    model: a Hugging Face directory, a .gguf file, a hub id, `demo`, or a preset's name with load_format="dummy".
    options: the fields of EngineConfig. Raises InputError for what cannot work and RankFailed where a rank does not
    come up. Under torchrun every rank makes the same LLM and the same calls; rank 0 gets the answers, the others empty
    lists.
    """

    def __init__(self, model: str, tensor_parallel_size: int | None = None, **options: Any) -> None:
        if tensor_parallel_size is not None:
            options["tensor_parallel_size"] = tensor_parallel_size
        config = EngineConfig.create(model, **options)
        weights = config.load_format != "dummy"
        self.source: ModelSource = open_model(config.model, config.revision, weights=weights)
        with progress_bar(f"loading {self.source.name}") as progress:
            self.executor: Executor = create_executor(config, self.source, progress)
        self.config = self.executor.config
        self._arrived: dict[int, deque[NewToken]] = {}  # by request: tokens that its stream has not taken yet
        self.core = build_core(self.executor, self.source, self.tokenizer)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None for a preset."""
        return load_tokenizer(self.source)

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> list[RequestOutput]:
        """Answer one prompt or many: text, or token ids. The answers are in the order of the prompts."""
        many = as_prompts(prompts)
        outputs: dict[int, RequestOutput] = {}
        with progress_bar("generating", unit="prompts") as draw:
            meter = Meter(draw, len(many))
            for delta in self.stream(many, sampling_params):
                outputs[delta.index] = delta.output
                meter.take(1, answered=delta.output.finished)
        return [outputs[index] for index in sorted(outputs)]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: Params = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, rendered by the model's chat template."""
        many = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        return self.generate([self.encode_chat(m, **template) for m in many], sampling_params)

    def encode_chat(self, messages: Any, **template: Any) -> list[int]:
        """The token ids of a conversation, with the opening of the answer."""
        return encode_chat(self._need_tokenizer(), messages, **template)

    def stream(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> Iterator[Delta]:
        """As generate, piece by piece as the tokens come."""
        if not self.executor.decides:
            self.executor.follow()
            return
        live: dict[int, Answer] = {}
        try:
            self._add_all(as_prompts(prompts), sampling_params, live)
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

    def _add_all(self, prompts: Sequence[Prompt], given: Params, live: dict[int, Answer]) -> None:
        """Queue every prompt, as often as its parameters ask for; its requests are entered in `live`."""
        encoded = [self._need_tokenizer().encode(p) if isinstance(p, str) else list(p) for p in prompts]
        for index, (prompt, ids, params) in enumerate(zip(prompts, encoded, as_params(given, prompts), strict=True)):
            if params.stop:
                self._need_tokenizer()  # stop strings are text
            bad_words = spell_out(params.bad_words, self.tokenizer)
            output = RequestOutput("", prompt if isinstance(prompt, str) else None, ids, [])
            for sample in range(params.n):
                request = self.core.add(ids, params, sample=sample, bad_words=bad_words)
                output.request_id = output.request_id or str(request.id)
                live[request.id] = Answer(index, request, output, self.tokenizer)
                self._arrived[request.id] = deque()

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
                if delta.completion.finish_reason:
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


def as_params(given: Params, prompts: Sequence[Prompt]) -> list[SamplingParams]:
    """The sampling parameters of each prompt."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * len(prompts)
    if len(given) != len(prompts):
        raise InputError(f"{len(given)} SamplingParams for {len(prompts)} prompts; give one for all, or one each")
    return list(given)
