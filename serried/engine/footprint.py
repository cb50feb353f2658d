"""Footprint: what each rank will hold, known from the files' headers alone, and whether this machine can hold it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from serried import _native
from serried.config import EngineConfig
from serried.errors import InputError, Misfit
from serried.kv.cache import CacheShape
from serried.machine import available_cores, available_memory
from serried.models.decoder import Decoder
from serried.models.registry import ModelSource
from serried.parallel.comm import LocalComm
from serried.parallel.partition import ModelPartition
from serried.weights.load import assign_methods, check_tensors, describe_methods, tensor_shapes
from serried.weights.spec import ITEMSIZE

CACHE_SHARE = 0.5  # of the memory that is free once the weights are there, over the ranks of this machine
PROCESS_BYTES = 64 << 20  # of a rank, beside weights and cache


@dataclass(frozen=True)
class RankFootprint:
    """One rank: its parameters (elements), heads, bytes of weights and of one block of the KV cache."""

    parameters: int
    query_heads: int
    kv_heads: int
    weight_bytes: int
    block_bytes: int


@dataclass(frozen=True)
class Footprint:
    """All ranks: the model's parameters (elements), what its tensors become, and each rank's part."""

    parameters: int
    weights: str
    ranks: Sequence[RankFootprint]


class _Place(LocalComm):
    """A rank's place in a group that does not exist yet."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


def footprint(config: EngineConfig, source: ModelSource) -> Footprint:
    """What each rank will hold. Misfit where the model cannot be split so; CheckpointError where files are wrong."""
    _check_split(config, source)
    size, itemsize = config.tensor_parallel_size, ITEMSIZE[config.dtype]
    model, partition = source.config, source.config.partition(config.weights)
    shards = [list(Decoder(model, partition, _Place(r, size), max_positions=1).parameters()) for r in range(size)]
    checkpoint = source.checkpoint(shards[0], config.load_format, config.seed)
    try:
        check_tensors(shards[0], checkpoint, source.ignores)
        for shard in shards:
            assign_methods(shard, checkpoint, config.quantization if _is_native(config) else "none")
        weights = describe_methods(shards[0], checkpoint, config.dtype)
    finally:
        checkpoint.close()
    ranks = []
    for rank, shard in enumerate(shards):
        kv_heads = partition.kv_heads_of(rank).size
        block = CacheShape(model.num_layers, 1, config.block_size, kv_heads, model.head_dim, itemsize)
        nominal = round(sum(parameter.nominal_bytes(config.dtype) for parameter in shard))
        elements = sum(parameter.elements for parameter in shard)
        ranks.append(RankFootprint(elements, partition.q_heads(rank).size, kv_heads, nominal, block.bytes_per_block))
    return Footprint(sum(map(math.prod, tensor_shapes(shards[0]).values())), weights or config.dtype, ranks)


def check_fit(config: EngineConfig, source: ModelSource, whole: Footprint) -> None:
    """Misfit, with options that would fit, where the context or this machine's memory is too small."""
    ranks = whole.ranks
    _check_context(config, source)
    if config.device == "cuda" or (config.device == "auto" and not _is_native(config)):
        return  # PyTorch will tell
    free = available_memory()
    left = free - sum(rank.weight_bytes + PROCESS_BYTES for rank in ranks)
    if left < sum(rank.block_bytes for rank in ranks):
        need = free - left
        less = _smaller(config, source, free)
        raise Misfit(
            f"{source.name}: its weights need {gib(need)} on {_ranks(len(ranks))}, and {gib(free)} are free"
            + ("" if less else "; not in 8 or 4 bits either: take a smaller model"),
            less,
        )
    _check_cache(config, source, ranks, left)


def describe(config: EngineConfig, source: ModelSource, whole: Footprint) -> list[str]:
    """Lines for a person: what will be loaded, and what each rank gets of it."""
    model, count = source.config, len(whole.ranks)
    threads = f"{config.threads} thread{'s' if config.threads > 1 else ''}"
    lines = [
        f"{source.name}: {model.family.name}, {whole.parameters / 1e6:,.1f} M parameters, {model.num_layers} layers, "
        f"computed in {config.dtype} on {_ranks(count)} of {threads}",
        f"weights: {whole.weights}",
    ]
    for number, rank in enumerate(whole.ranks):
        lines.append(
            f"rank {number}: {rank.parameters / 1e6:,.1f} M parameters in {gib(rank.weight_bytes)}, "
            f"{rank.query_heads} query heads, {rank.kv_heads} KV heads, "
            f"{rank.block_bytes // config.block_size:,} bytes of KV cache a token"
        )
    return lines


def option_words(config: EngineConfig) -> str:
    """The model and the options of a config that are not the defaults, as they are given on a command line."""
    words = [config.model]
    for each in fields(config):
        value = getattr(config, each.name)
        if each.name == "model" or value == each.default or value is None:
            continue
        name = each.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return " ".join(words)


def gib(size: float) -> str:
    """Bytes for a person."""
    return f"{size / (1 << 30):,.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):,.1f} MiB"


def _check_split(config: EngineConfig, source: ModelSource) -> None:
    try:
        source.config.partition(config.weights)
    except InputError as error:
        largest = ModelPartition.max_ranks(source.config.num_heads, source.config.head_dim)
        size = min(largest, available_cores())
        fits = option_words(config.resolve(tensor_parallel_size=size, tp_weights=None))
        raise Misfit(str(error), fits) from None


def _check_context(config: EngineConfig, source: ModelSource) -> None:
    context = source.config.max_position
    if (config.max_model_len or 0) > context:
        said = f"--max-model-len {config.max_model_len}: the model's context is {context}"
        raise Misfit(said, option_words(config.resolve(max_model_len=context)))


def _check_cache(config: EngineConfig, source: ModelSource, ranks: Sequence[RankFootprint], left: int) -> None:
    """Misfit where the KV cache is too large for the memory that is `left`, or too small for what is asked of it."""
    given, longest = config.kv_cache_memory, config.max_model_len
    if given and given * len(ranks) > left:
        raise Misfit(
            f"--kv-cache-memory {given}: {gib(given * len(ranks))} on {_ranks(len(ranks))}, and beside the weights "
            f"{gib(left)} are free",
            option_words(config.resolve(kv_cache_memory=int(left * CACHE_SHARE) // len(ranks))),
        )
    memory = given or int(left * CACHE_SHARE) // len(ranks)
    block, size = max(rank.block_bytes for rank in ranks), config.block_size
    if memory < block:
        raise Misfit(
            f"--kv-cache-memory {memory}: too small for one block of {size} tokens, {block} bytes",
            option_words(config.resolve(kv_cache_memory=-(-(longest or source.config.max_position) // size) * block)),
        )
    if longest and memory // block * size < longest:
        raise Misfit(
            f"--max-model-len {longest}: a sequence of that length needs {gib(-(-longest // size) * block)} of KV "
            f"cache on a rank, and there {'are' if given else 'would be'} {gib(memory)}",
            option_words(config.resolve(max_model_len=memory // block * size)),
        )


def _smaller(config: EngineConfig, source: ModelSource, free: int) -> str:
    """The options for the same model in the widest format in which it fits; empty where there is none."""
    for quantization in ("int8", "int4"):
        less = config.resolve(quantization=quantization)
        ranks = footprint(less, source).ranks
        if _is_native(less) and sum(rank.weight_bytes + PROCESS_BYTES + rank.block_bytes for rank in ranks) <= free:
            return option_words(less)
    return ""


def _is_native(config: EngineConfig) -> bool:
    """Whether it runs on the native backend, where weights stay quantized."""
    chosen = config.backend == "auto" and config.device != "cuda" and _native.available()
    return config.backend == "native" or chosen


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
