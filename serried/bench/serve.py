"""`serried bench serve`: load on a server with an OpenAI-compatible API, ours or another, over HTTP."""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from serried.bench.serving_metrics import Record, summarize
from serried.bench.workload import Workload
from serried.errors import InputError, SerriedError

TIMEOUT = 600.0  # seconds that a server may be silent

Report = Callable[[int, int], None]


class ServeBench:
    """Sends a workload to `base_url` (http://host:port, without /v1).

    most: requests in flight at once. bounds: of goodput. The first request of a run is sent twice, the first time to
    warm the server up.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None,
        workload: Workload,
        most: int,
        bounds: Mapping[str, float],
        api_key: str | None = None,
        ignore_eos: bool = True,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.workload = workload
        self.bounds = bounds
        self._most = most
        self._ignore_eos = ignore_eos
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def run(self, report: Report) -> dict[str, Any]:
        """All figures; SerriedError where no request has succeeded."""
        return asyncio.run(self._run(report))

    async def _run(self, report: Report) -> dict[str, Any]:
        http = _aiohttp()
        connections, timeout = http.TCPConnector(limit=0), http.ClientTimeout(total=None, sock_read=TIMEOUT)
        async with http.ClientSession(connector=connections, timeout=timeout, headers=self._headers) as client:
            model = self.model or await self._served_model(client)
            prompts = self.workload.prompts()
            await self._ask(client, model, prompts[0], Record(0.0), 0.0)
            start, done = time.perf_counter(), 0
            gate = asyncio.Semaphore(self._most)

            async def one(at: float, prompt: str | list[int]) -> Record:
                nonlocal done
                await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
                async with gate:
                    record = Record(time.perf_counter() - start)
                    await self._ask(client, model, prompt, record, start)
                done += 1
                report(done, self.workload.requests)
                return record

            records = await asyncio.gather(*map(one, self.workload.arrivals(), prompts))
        duration = max(record.done for record in records) - records[0].sent
        result = summarize(records, duration, self.bounds)
        if not result["completed"]:
            raise SerriedError(f"{self.base_url}: no request has succeeded; the first error: {result['first_error']}")
        return {"bench": "serve", "model": model, "workload": self.workload.kind, **result}

    async def _served_model(self, client: Any) -> str:
        try:
            async with client.get(f"{self.base_url}/v1/models") as answer:
                answer.raise_for_status()
                return str(json.loads(await answer.read())["data"][0]["id"])  # whatever type it says it is
        except (_aiohttp().ClientError, KeyError, IndexError, ValueError, TimeoutError) as error:
            raise InputError(
                f"--base-url {self.base_url}: /v1/models does not answer as a server does: {error}"
            ) from None

    async def _ask(self, client: Any, model: str, prompt: str | Sequence[int], record: Record, start: float) -> None:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": self.workload.output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self._ignore_eos else {}),
        }
        bare_end = False
        try:
            async with client.post(f"{self.base_url}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    record.error = f"status {answer.status}: {(await answer.text(errors='replace'))[:500]}"
                    return
                async for event in _events(answer):
                    if self._take(event, record, time.perf_counter() - start):
                        bare_end = _is_bare_end(event)
        except (_aiohttp().ClientError, ValueError, TimeoutError) as error:
            record.error = f"{type(error).__name__}: {error}"
        finally:
            record.done = time.perf_counter() - start
        if record.output_tokens == 0:  # a server that counts nothing: a piece is a token
            if bare_end and len(record.pieces) > 1:
                record.pieces.pop()
            record.output_tokens = len(record.pieces)

    def _take(self, event: dict[str, Any], record: Record, now: float) -> bool:
        """Note what an event tells; whether it is a piece of the answer."""
        if "error" in event:
            record.error = str(event["error"])[:500]
        usage = event.get("usage")
        if usage:
            record.input_tokens = usage["prompt_tokens"]
            record.output_tokens = usage["completion_tokens"]
        if not event.get("choices"):
            return False
        record.pieces.append(now)
        return True


def _is_bare_end(event: dict[str, Any]) -> bool:
    """Whether a piece only says that the answer has ended, as llama-cpp-python's server does after the last token."""
    choice = event["choices"][0]
    return bool(choice.get("finish_reason")) and not choice.get("text")


async def _events(answer: Any) -> AsyncIterator[dict[str, Any]]:
    """The JSON documents of a stream of server-sent events."""
    async for line in answer.content:
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        event: dict[str, Any] = json.loads(data)
        yield event


def _aiohttp() -> Any:
    try:
        return importlib.import_module("aiohttp")
    except ImportError:
        raise InputError("bench serve needs aiohttp: pip install 'serried[bench]'") from None
