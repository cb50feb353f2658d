"""An engine that says what a test has told it, and a server around it on a free port of loopback."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from serried.engine.interface import (
    EngineStats,
    GrammarSpec,
    ModelInfo,
    RankStats,
    TokenDelta,
    TokenLogprobs,
)
from serried.sampling_params import SamplingParams
from serried.server.options import ServerConfig
from serried.server.run import Server, bind
from serried.text.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]")
EOS = 2
CHAT = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.items() | list }}){% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
HERMES = CHAT + "{# <tool_call> #}"
THINKS = HERMES + "{# </think> #}"
MISTRAL = CHAT + "{# [TOOL_CALLS] #}"


@cache
def tiny_tokenizer(template: str | None = CHAT) -> Tokenizer:
    """A byte-level BPE of 400 tokens; token 2 ends the output."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(
        ["the answer is that there is no other answer than the answer itself", "one two"], trainer
    )
    with TemporaryDirectory() as name:
        backend.save(str(Path(name) / "tokenizer.json"))
        config = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "chat_template": template}
        (Path(name) / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer.from_directory(name)


def counted(prompt: Sequence[int], index: int) -> str:
    """What the engine says by itself: a function of the prompt."""
    return f"{len(prompt)} tokens: the answer, number {index}, is {sum(prompt) % 997} 😀 and no other."


class FakeEngine:
    """Says `say(prompt, index)`, a token a step; tests hold it, break it, and look at what it was asked.

    delay: seconds a token. hold: while set, no more tokens come. error: raised after `error_after` tokens (0: before
    the first). asked: every request. live: ids of those that run.
    """

    def __init__(self, say: Callable[[Sequence[int], int], str | list[int]] = counted, template: str = CHAT) -> None:
        self.tokenizer: Tokenizer | None = tiny_tokenizer(template)
        self.model = ModelInfo("tiny", 2048, 512, frozenset({EOS}))
        self.say = say
        self.delay = 0.0
        self.hold = threading.Event()
        self.error: BaseException | None = None
        self.error_after = 0
        self.ready_error: BaseException | None = None
        self.failure: str | None = None
        self.asked: list[dict[str, Any]] = []
        self.live: dict[str, set[int]] = {}
        self.generated = 0
        self.closed = False

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        grammar: GrammarSpec | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        self.asked.append(
            {"prompt": list(prompt), "params": params, "priority": priority, "salt": cache_salt, "grammar": grammar}
        )
        self.live[request_id] = set(range(params.n))
        try:
            scripts = [self._script(prompt, index, params) for index in range(params.n)]
            scores = [None, *(self._scores(token, params.prompt_logprobs) for token in prompt[1:])]
            first = scores if params.prompt_logprobs is not None else None
            for number in range(max(map(len, scripts)) + 1):
                if self.error is not None and number >= self.error_after:
                    raise self.error
                while self.hold.is_set():
                    await asyncio.sleep(0.005)
                await asyncio.sleep(self.delay)
                for index in sorted(self.live[request_id]):
                    delta = self._delta(scripts[index], number, index, params)
                    if delta.finish_reason:
                        self.live[request_id].discard(index)
                    self.generated += 1
                    yield replace(delta, prompt_logprobs=first, cached_tokens=min(2, len(prompt)) if number == 0 else 0)
                    first = None
                if not self.live[request_id]:
                    return
        finally:
            del self.live[request_id]

    def _script(self, prompt: Sequence[int], index: int, params: SamplingParams) -> list[int]:
        said = self.say(prompt, index)
        if isinstance(said, str):
            if self.tokenizer is None:
                return [5, 6, 7, EOS]
            said = [*self.tokenizer.encode(said, add_special=False, parse_special=True), EOS]
        return said[: params.max_tokens]

    def _delta(self, script: list[int], number: int, index: int, params: SamplingParams) -> TokenDelta:
        token, last = script[number], number == len(script) - 1
        reason: Any = None
        if last:
            reason = "stop" if token == EOS or token in params.stop_token_ids else "length"
        elif token in params.stop_token_ids:
            reason = "stop"
        scores = None if params.logprobs is None else [self._scores(token, params.logprobs)]
        by_token = token if reason == "stop" and token in params.stop_token_ids else None
        return TokenDelta(index, [token], scores, finish_reason=reason, stop_reason=by_token)  # type: ignore[arg-type]

    def _scores(self, token: int, top: int | None) -> TokenLogprobs:
        """The token itself is the second likeliest, and the last one is impossible."""
        ids = [token, (token + 1) % 400, *((token + 2 + k) % 400 for k in range(max(0, (top or 0) - 2)))]
        values = [-1.0, -0.5, *(-2.0 - k for k in range(len(ids) - 2))]
        if len(ids) > 3:
            values[-1] = float("-inf")
        ranks = [2, 1, *range(3, len(ids) + 1)]
        return TokenLogprobs(tuple(ids), tuple(values), tuple(ranks))

    async def abort(self, request_id: str, index: int | None = None) -> None:
        live = self.live.get(request_id)
        if live is not None:
            live.difference_update({index} if index is not None else set(live))

    def stats(self) -> EngineStats:
        ranks = [RankStats(0, 6.0, 2.0, 2.0), RankStats(1, 5.0, 3.0, 2.0)]
        return EngineStats(
            running=len(self.live), blocks_used=5, blocks_total=50, generated_tokens=self.generated, ranks=ranks
        )

    async def check_ready(self) -> None:
        if self.ready_error is not None:
            raise self.ready_error

    async def close(self) -> None:
        self.closed = True


class Served:
    """A running server: its address, its engine, and `loading`, which ends when the test releases it."""

    def __init__(self, url: str, engine: FakeEngine, server: Server, release: threading.Event) -> None:
        self.url, self.engine, self.server, self.release = url, engine, server, release

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def idle(self, seconds: float = 5.0) -> bool:
        """Whether no request runs any more, soon."""
        deadline = time.monotonic() + seconds
        while self.engine.live and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.engine.live


@contextmanager
def served(engine: FakeEngine | None = None, wait: bool = True, **options: Any) -> Iterator[Served]:
    """A server in a thread. wait: until the engine is loaded."""
    engine = engine or FakeEngine()
    release = threading.Event()
    if wait:
        release.set()

    async def load() -> FakeEngine:
        while not release.is_set():
            await asyncio.sleep(0.005)
        return engine

    config = ServerConfig(port=0, access_log=False, log_level="error", **options)
    with bind(config) as listener:
        server = Server(config, "tiny", load)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        scheme = "https" if config.ssl_certfile else "http"
        try:
            deadline = time.monotonic() + 20
            state = server.config.app.state.serried  # type: ignore[union-attr]
            while not server.started or (wait and state.engine_or_none is None):
                if not thread.is_alive() or time.monotonic() > deadline:
                    raise RuntimeError("the server did not start")
                time.sleep(0.005)
            yield Served(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", engine, server, release)
        finally:
            server.should_exit = True
            thread.join(20)
