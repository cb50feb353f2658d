"""`python -m serried.bench.peer_llama`: llama.cpp as a peer, with the defaults of its own benchmark tools.

That is: the file mapped and repacked for this CPU where it can be, KV cache in float16, flash attention `auto`,
micro-batches of 512 tokens, a cache of its own for each sequence, no sampling (each step feeds ids drawn beforehand).
Its threads are OpenMP's, which sleep a few milliseconds after a step: an idle peer takes no core.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serried.bench.peer import About, Setup, Task, serve
from serried.errors import InputError
from serried.machine import peak_rss_bytes

CELLS = 256  # llama.cpp rounds the cache of a sequence up to a multiple of this
BATCH = 2048  # tokens handed over at once


class LlamaEngine:
    """A model, and a context made anew for each task, with a cache that fits it."""

    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        start = time.perf_counter()
        self.lib: Any = import_module("llama_cpp")
        self._log: list[str] = []
        # Kept: C holds the callback.
        self._on_log = self.lib.llama_log_callback(lambda level, text, data: self._note(text))
        self.lib.llama_log_set(self._on_log, None)
        self.lib.llama_backend_init()
        params = self.lib.llama_model_default_params()
        self._model = self.lib.llama_model_load_from_file(str(Path(setup.path)).encode(), params)
        if not self._model:
            raise InputError(f"{setup.path}: llama.cpp cannot load it: {self._last_words()}")
        stack.callback(self.lib.llama_model_free, self._model)
        self._threads = setup.threads
        self._vocab_size = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self._model))
        self._context: Any = None
        stack.callback(self._drop)
        self._open(setup.sequences, setup.positions)
        seconds = time.perf_counter() - start
        self.about = About(self._version(), self._build(), seconds, peak_rss_bytes() / (1 << 20))

    def prepare(self, task: Task) -> None:
        self._open(task.sequences, task.positions)
        self.task = task
        ids = np.random.default_rng(0).integers(0, min(1000, self._vocab_size), (task.positions, task.sequences))
        self._ids = ids.astype(np.int32)
        step = max(1, BATCH // task.sequences)
        for start in range(0, task.context, step):
            self._decode(self._ids[start : min(start + step, task.context)], start, wanted=False)

    def run(self) -> float:
        task, lib = self.task, self.lib
        if not lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), -1, task.context, -1):
            raise InputError("llama.cpp cannot cut the cache of this model back; it cannot be measured")
        start = time.perf_counter()
        for i in range(task.steps):
            at = task.context + i * task.tokens
            self._decode(self._ids[at : at + task.tokens], at, wanted=True)
        return time.perf_counter() - start

    def logits(self, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
        self._open(1, len(prompt))
        self._decode(np.array(prompt, np.int32)[:, None], 0, wanted=True)
        found = self.lib.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(found, (self._vocab_size,)).copy()

    def _open(self, sequences: int, positions: int) -> None:
        """A context with room for so many sequences of so many positions."""
        self._drop()
        params = self.lib.llama_context_default_params()
        params.n_seq_max = sequences
        params.n_ctx = sequences * (-(-positions // CELLS) * CELLS)
        params.n_batch = BATCH
        params.n_threads = params.n_threads_batch = self._threads
        self._context = self.lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise InputError(
                f"llama.cpp cannot make a context of {sequences} x {positions} positions: {self._last_words()}"
            )

    def _drop(self) -> None:
        if self._context:
            self.lib.llama_free(self._context)
            self._context = None

    def _decode(self, ids: npt.NDArray[np.int32], start: int, *, wanted: bool) -> None:
        """One call for tokens [positions, sequences] from position `start` on; `wanted`: logits after the last."""
        positions = ids.shape[0]
        batch = self.lib.llama_batch_init(ids.size, 0, 1)
        try:
            batch.n_tokens = ids.size
            for i, token in enumerate(ids.T.reshape(-1).tolist()):  # a sequence's tokens lie together
                sequence, at = divmod(i, positions)
                batch.token[i], batch.pos[i] = token, start + at
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = wanted and at == positions - 1
            if code := self.lib.llama_decode(self._context, batch):
                raise InputError(f"llama.cpp: llama_decode gave {code}: {self._last_words()}")
            self.lib.llama_synchronize(self._context)
        finally:
            self.lib.llama_batch_free(batch)

    def _version(self) -> str:
        return f"llama-cpp-python {self.lib.__version__}"

    def _build(self) -> str:
        """The features that it was built with: `AVX512 AMX_INT8 ...`."""
        words = self.lib.llama_print_system_info().decode().replace("CPU :", "").split("|")
        return " ".join(word.split("=")[0].strip() for word in words if word.strip().endswith("= 1"))

    def _note(self, text: bytes) -> None:
        self._log.append(text.decode(errors="replace"))

    def _last_words(self) -> str:
        lines = [line for line in "".join(self._log).splitlines() if line.strip()]
        return " / ".join(lines[-3:])


if __name__ == "__main__":
    serve(LlamaEngine)
