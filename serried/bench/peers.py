"""`serried bench peers`: llama.cpp and Serried side by side, in turn: the same file, threads and memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from serried.bench.divergence import kl_divergence
from serried.bench.limits import Limits, median
from serried.bench.peer import Peer, Setup, Task
from serried.bench.peer_file import PeerFile, find_file, folder_for
from serried.config import EngineConfig
from serried.errors import InputError
from serried.models.config import ModelConfig
from serried.progress import progress_bar

DEFAULT_MODELS = ("demo", "qwen3-0.6b:BF16", "qwen3-0.6b:Q8_0", "qwen3-0.6b:Q4_0")
MODULES = {"serried": "serried.bench.peer_serried", "llama_cpp": "serried.bench.peer_llama"}
PACKAGE = "llama_cpp"
CRASHED = (
    "; if it died in its AMX kernels, its compiler was one of the GCC releases that drop the stores to a tile "
    "configuration (12.2 is one): CXXFLAGS='-fno-tree-dse -fno-dse' pip install --force-reinstall --no-cache-dir "
    "llama-cpp-python makes them stay"
)
PROMPT = 32  # tokens, after which both peers' next-token distributions are compared
CACHE_ITEM = 2  # bytes: float16 there, bfloat16 here

TASKS = (Task(1, 0, 512, 1), Task(1, 0, 1, 32), Task(1, 512, 1, 32), Task(8, 64, 1, 16), Task(32, 64, 1, 8))


def bench_peers(models: Sequence[str], config: EngineConfig, cache_dir: str | None, rounds: int) -> dict[str, Any]:
    """Tokens a second of both for each file and task, and the median of each round's ratio (docs/benchmarks.md).

    models: `demo`, .gguf files, PRESET:TYPE (dummy weights, written into cache_dir, or into a folder that is removed).
    """
    if config.revision is not None:
        raise InputError(f"--revision {config.revision}: bench peers takes files and presets, no models of the hub")
    if importlib.util.find_spec(PACKAGE) is None:
        raise InputError(
            "bench peers: llama.cpp's Python package is not installed; pip install 'serried[peers]' compiles it for "
            "this CPU, in some minutes"
        )
    threads = config.tensor_parallel_size * config.threads
    runs: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    with folder_for(cache_dir) as folder:
        files = [find_file(model, folder, config.seed) for model in models or DEFAULT_MODELS]
        limits = Limits(threads)
        for file in files:
            with ExitStack() as stack, progress_bar(file.name) as progress:
                peers = _start(file, config, threads, stack)
                about = {f"{name}_version": f"{p.about.version} ({p.about.build})" for name, p in peers.items()}
                head = {"file": file.name, "types": file.types, **_opening(peers, file)}
                for done, task in enumerate(TASKS):
                    runs.append({**head, **_measure(peers, task, file, limits, rounds)})
                    if progress:
                        progress(done + 1, len(TASKS))
    return {"bench": "peers", "threads": threads, "tp": config.tensor_parallel_size, **about, "runs": runs}


def _measure(peers: Mapping[str, Peer], task: Task, file: PeerFile, limits: Limits, rounds: int) -> dict[str, Any]:
    """One task of one file: both in turn, the memory's speed before and after each pair."""
    for peer in peers.values():
        peer.prepare(task)
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    allowed, read = [], [limits.read()]
    for _ in range(rounds):
        for name, peer in peers.items():
            seconds[name].append(peer.run())
        read.append(limits.read())
        allowed.append(task.steps * _bytes_of_step(file, task) / ((read[-2] + read[-1]) / 2))
    reading = task.tokens == 1  # a prefill is not bound by memory
    return {
        "measure": "decode" if reading else "prefill",
        "batch_size": task.sequences,
        "context": task.context,
        "new_tokens": task.tokens * task.steps,
        **{f"{name}_tokens_per_s": task.timed_tokens / median(found) for name, found in seconds.items()},
        "ratio": _median_ratio(seconds["llama_cpp"], seconds["serried"]),
        "membw_gbps": median(read) / 1e9,
        **{
            f"fraction_of_memory_{name}": _median_ratio(allowed, found) if reading else None
            for name, found in seconds.items()
        },
    }


def _median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return median([a / b for a, b in zip(over, under, strict=True)])


def _opening(peers: Mapping[str, Peer], file: PeerFile) -> dict[str, Any]:
    """What the peers say before anything is timed: how they opened the file, and that they compute the same thing."""
    ids = [int(i) for i in np.random.default_rng(0).integers(0, min(1000, file.config.vocab_size), PROMPT)]
    theirs, ours = (peers[name].logits(ids)[None] for name in ("llama_cpp", "serried"))
    return {
        **{f"{name}_load_s": peer.about.load_s for name, peer in peers.items()},
        **{f"{name}_peak_rss_mib": peer.about.peak_rss_mib for name, peer in peers.items()},
        "kl_divergence": float(kl_divergence(theirs, ours)[0]),
    }


def _start(file: PeerFile, config: EngineConfig, threads: int, stack: ExitStack) -> dict[str, Peer]:
    longest = max(PROMPT, *(task.positions for task in TASKS))
    if longest > file.config.max_position:
        raise InputError(f"{file.name}: its context is {file.config.max_position}; {longest} positions are measured")
    chosen = config.resolve(
        model=str(file.path),
        load_format="auto",
        max_model_len=longest,
        max_num_batched_tokens=max(config.max_num_batched_tokens, *(task.tokens for task in TASKS)),
        kv_cache_memory=config.kv_cache_memory or _cache_bytes(file.config, config.block_size),
    )
    setup = Setup(str(file.path), threads, chosen, 1, PROMPT)
    peers: dict[str, Peer] = {}
    for name, module in MODULES.items():
        peers[name] = Peer(name, module, setup, CRASHED if name == "llama_cpp" else "")
        stack.callback(peers[name].close)
    return peers


def _cache_bytes(model: ModelConfig, block: int) -> int:
    """A cache that every task fits in, also in float32 and with all KV heads on a rank."""
    blocks = max(task.sequences * -(-task.positions // block) for task in TASKS)
    return blocks * block * model.num_layers * 2 * model.num_kv_heads * model.head_dim * 4


def _bytes_of_step(file: PeerFile, task: Task) -> float:
    """Bytes that a decode step reads at least: the file's matrices, and half the cache of the steps' positions."""
    model, positions = file.config, task.context + task.steps / 2
    cache = 2 * model.num_layers * model.num_kv_heads * model.head_dim * CACHE_ITEM
    return file.weight_bytes + task.sequences * positions * cache
