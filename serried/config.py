"""EngineConfig: every choice about an engine, frozen. The only reader of the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from serried.errors import InputError
from serried.machine import available_cores

DTYPES = ("bfloat16", "float32")
QUANTIZATIONS = ("none", "int8", "int4")
LOAD_FORMATS = ("auto", "dummy")
BACKENDS = ("auto", "native", "torch")
ALGORITHMS = ("auto", "one-shot", "two-shot")
MAX_THREADS = 4096
DEVICES = ("auto", "cpu", "cuda")
SABOTAGES = ("skip-reduce", "swap-shards", "double-bias", "activation-first", "rank-order")


@dataclass(frozen=True)
class EngineConfig:
    """What to load and how to split and run it. Names and meanings are vLLM's where vLLM has them.

    revision: of a model on the hub: a branch, a tag or a commit (None: its main branch). dtype: of activations, of the
    KV cache and of weights that are not quantized. quantization: of weights (None: as the checkpoint has them; "none":
    dequantized). tp_weights: the ranks' shares, as positive integers (None: equal). threads_per_rank: None for cores /
    ranks. max_model_len: the longest sequence, prompt and output together (None: what the model and the memory allow).
    kv_cache_memory: bytes of KV cache a rank (None: a share of the free memory). collective_timeout: seconds that a
    rank waits for its peers. allreduce_algorithm: of the native backend. sabotage: damage the last rank on purpose
    (for `verify`).
    """

    model: str
    revision: str | None = None
    dtype: str = "bfloat16"
    quantization: str | None = None
    backend: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    seed: int = 0
    tensor_parallel_size: int = 1
    tp_weights: tuple[int, ...] | None = None
    threads_per_rank: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 32
    kv_cache_memory: int | None = None
    enable_prefix_caching: bool = True
    collective_timeout: float = 300.0
    allreduce_algorithm: str = "auto"
    sabotage: str | None = None

    def __post_init__(self) -> None:
        if self.revision is not None and not (isinstance(self.revision, str) and self.revision.strip()):
            raise InputError(f"--revision {self.revision}: expected a branch, a tag or a commit")
        _one_of("--dtype", self.dtype, DTYPES)
        if self.quantization is not None:
            _one_of("--quantization", self.quantization, QUANTIZATIONS)
        _one_of("--load-format", self.load_format, LOAD_FORMATS)
        _one_of("--allreduce-algorithm", self.allreduce_algorithm, ALGORITHMS)
        _one_of("--device", self.device, DEVICES)
        _one_of("--backend", self.backend, BACKENDS)
        if self.sabotage is not None:
            _one_of("--sabotage", self.sabotage, SABOTAGES)
        for option in ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            _positive(option, getattr(self, option))
        for option in ("threads_per_rank", "max_model_len", "kv_cache_memory"):
            if getattr(self, option) is not None:
                _positive(option, getattr(self, option))
        if (self.threads_per_rank or 1) > MAX_THREADS:
            raise InputError(f"--threads-per-rank {self.threads_per_rank}: expected at most {MAX_THREADS}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 1 << 64:
            raise InputError(f"--seed {self.seed}: expected a whole number from 0 to 2^64 - 1")
        if not 0 < self.collective_timeout < float("inf"):
            raise InputError(f"--collective-timeout {self.collective_timeout}: expected a number of seconds")
        self._check_weights()

    def _check_weights(self) -> None:
        weights = self.tp_weights
        if weights is None:
            return
        if len(weights) != self.tensor_parallel_size:
            raise InputError(
                f"--tp-weights {','.join(map(str, weights))}: {len(weights)} weights for "
                f"--tensor-parallel-size {self.tensor_parallel_size}; give one a rank"
            )
        if not all(isinstance(w, int) and 1 <= w <= 1 << 20 for w in weights):
            raise InputError(f"--tp-weights {','.join(map(str, weights))}: expected positive whole numbers")

    @classmethod
    def create(cls, model: str, **options: object) -> EngineConfig:
        """A config from keyword options; an unknown one is an error, with the close ones named."""
        unknown = sorted(set(options) - set(cls.__dataclass_fields__))
        if unknown:
            import difflib

            near = difflib.get_close_matches(unknown[0], cls.__dataclass_fields__, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(f"unknown option {unknown[0]!r}{hint}")
        world = torchrun_environment()
        if world is not None:
            options.setdefault("tensor_parallel_size", world.size)
        if isinstance(options.get("tp_weights"), list):
            options["tp_weights"] = tuple(options["tp_weights"])  # type: ignore[arg-type]
        return cls(model, **options)  # type: ignore[arg-type]

    def resolve(self, **options: object) -> EngineConfig:
        """A new config with some options decided."""
        return replace(self, **options)  # type: ignore[arg-type]

    @property
    def weights(self) -> tuple[int, ...]:
        """One weight a rank."""
        return self.tp_weights or (1,) * self.tensor_parallel_size

    @property
    def threads(self) -> int:
        """Threads a rank: as given, or the cores that this process may use over the ranks."""
        return self.threads_per_rank or max(1, available_cores() // self.tensor_parallel_size)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{option} {value}: unknown; choose from {', '.join(allowed)}")


def _positive(option: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 48:
        raise InputError(f"--{option.replace('_', '-')} {value}: expected a whole number of at least 1")


@dataclass(frozen=True)
class TorchrunWorld:
    """The world that torchrun made, as its environment variables tell it."""

    rank: int
    size: int
    local_rank: int
    master_addr: str
    master_port: int

    @property
    def loopback(self) -> bool:
        """Whether all ranks are known to be on this machine."""
        return self.master_addr in {"127.0.0.1", "localhost", "::1"}


def torchrun_environment() -> TorchrunWorld | None:
    """The world that torchrun made, if it started this process."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" not in env or "RANK" not in env:
        return None
    return TorchrunWorld(
        rank=int(env["RANK"]),
        size=int(env["WORLD_SIZE"]),
        local_rank=int(env.get("LOCAL_RANK", "0")),
        master_addr=env["MASTER_ADDR"],
        master_port=int(env["MASTER_PORT"]),
    )


def is_main_rank() -> bool:
    """Whether this process may print: all but torchrun's ranks above 0."""
    world = torchrun_environment()
    return world is None or world.rank == 0


def child_environment() -> Mapping[str, str]:
    """The environment that child processes start from."""
    return dict(os.environ)


def forced_isa() -> str | None:
    """The instruction set that SERRIED_ISA names, for the native kernels."""
    return os.environ.get("SERRIED_ISA") or None


def environment_options() -> Mapping[str, str]:
    """Options given as SERRIED_* variables, by name: SERRIED_MAX_MODEL_LEN is max_model_len."""
    prefix, others = "SERRIED_", {"isa"}
    given = {key.removeprefix(prefix).lower(): value for key, value in os.environ.items() if key.startswith(prefix)}
    return {name: value for name, value in given.items() if name not in others}
