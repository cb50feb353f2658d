"""`serried bench` as a user meets it: its fields, that they fit together, and what a step has to do by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import Models

from serried import _native
from serried.bench import allreduce, forward, kernels, limits
from serried.bench.forward import decode_flops, prefill_flops
from serried.bench.steps import BenchEngine, Layout
from serried.cli.main import main
from serried.config import EngineConfig
from serried.engine.worker import Worker
from serried.errors import InputError
from serried.models.decoder import Decoder
from serried.models.registry import open_model

pytestmark = pytest.mark.skipif(not _native.available(), reason="Serried was installed without its extension")
Captured = pytest.CaptureFixture[str]

LIMIT = {"limit", "limit_tokens_per_s", "fraction_of_limit", "membw_gbps", "multiply_gflops"}
SHARES = {"collective_share", "wait_share", "outside_kernels_share"}
LAYOUT = {"tp", "threads_per_rank", "dtype", "quantization"}
DECODE = {*LAYOUT, *LIMIT, *SHARES, "batch_size", "context", "tokens_per_s", "ms_per_step", "bytes_per_step"}
PREFILL = {*LAYOUT, *LIMIT, *SHARES, "input_len", "tokens_per_s", "ms_per_step", "flops"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the limits that takes milliseconds; what it finds is then no limit."""
    monkeypatch.setattr(limits, "READ_BYTES", 8 << 20)
    monkeypatch.setattr(limits, "MULTIPLY_ROUNDS", 2000)
    monkeypatch.setattr(kernels, "COPIES_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "PREFILL", 32)
    monkeypatch.setattr(forward, "STEPS", 3)
    monkeypatch.setattr(allreduce, "SIZES", (1024, 1 << 16))
    monkeypatch.setattr(allreduce, "SECONDS", 0.002)


@pytest.fixture(scope="module")
def path(tiny: Models) -> Path:
    return tiny.directory("split-9-3")


def bench(capfd: Captured, *words: object) -> dict[str, Any]:
    code = main(["bench", *map(str, words), "--rounds", "1", "--json"])
    out, err = capfd.readouterr()
    assert code == 0, err
    document: dict[str, Any] = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return document


def numbers(value: Any, at: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a document, each with its key."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from numbers(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from numbers(each, at)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield at, value


def assert_sound(document: dict[str, Any]) -> None:
    """Finite and above 0; a share may be 0, and is less than 1; what exactness costs may even be less than nothing."""
    for key, value in numbers(document):
        assert math.isfinite(value), key
        if key.endswith("_share"):
            assert 0 <= value < 1, key
        elif key != "fraction_exactness_costs":
            assert value > 0, key


def assert_consistent(run: dict[str, Any], tokens: int, work_bytes: float, flops: float) -> None:
    """Of one round a median is the value: every figure follows from others."""
    assert_sound(run)
    assert run["tokens_per_s"] == pytest.approx(tokens / run["ms_per_step"] * 1e3)
    by_memory = work_bytes / (run["membw_gbps"] * 1e9)
    by_compute = flops / (run["multiply_gflops"] * 1e9)
    assert run["limit"] == ("memory" if by_memory >= by_compute else "compute")
    assert run["limit_tokens_per_s"] == pytest.approx(tokens / max(by_memory, by_compute))
    assert run["fraction_of_limit"] == pytest.approx(run["tokens_per_s"] / run["limit_tokens_per_s"])
    assert sum(run[share] for share in SHARES) < 1.02
    if run["tp"] == 1:
        assert run["collective_share"] == run["wait_share"] == 0
    else:
        assert run["collective_share"] > 0


# The tiny model: two layers of q 64 x 288, k and v 64 x 96, o 288 x 64, an MLP of 600, a tied embedding of 449.
LAYER = 64 * (2 * 288 + 2 * 96 + 3 * 600)
HEAD = 449 * 64
KV_BYTES = 2 * 2 * 96 * 2  # of a position, in bf16: layers, K and V, columns, bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_decode(path: Path, capfd: Captured, dtype: str) -> None:
    run = bench(capfd, "decode", path, "--batch-size", 3, "--context", 40, "--threads-per-rank", 1, "--dtype", dtype)
    assert set(run) >= DECODE
    assert (run["tp"], run["threads_per_rank"], run["batch_size"], run["context"]) == (1, 1, 3, 40)
    assert (run["dtype"], run["quantization"]) == (dtype, "none")
    bytes_bf16 = 2 * (2 * LAYER + HEAD) + 3 * 40 * KV_BYTES
    assert run["bytes_per_step"] == bytes_bf16 * (2 if dtype == "float32" else 1)
    assert_consistent(run, 3, run["bytes_per_step"], 3 * (2 * (2 * LAYER + HEAD) + 4 * 2 * 288 * 40))


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8.5), ("int4", 5)])
def test_decode_with_quantized_weights(path: Path, capfd: Captured, quantization: str, bits: float) -> None:
    """Bytes are what the weights were loaded in: int4 leaves the embedding in int8."""
    run = bench(capfd, "decode", path, "--context", 40, "--threads-per-rank", 1, "--quantization", quantization)
    assert (run["dtype"], run["quantization"]) == ("bfloat16", quantization)
    assert run["bytes_per_step"] == 2 * LAYER * bits / 8 + HEAD * 8.5 / 8 + 40 * KV_BYTES
    assert_consistent(run, 1, run["bytes_per_step"], 2 * (2 * LAYER + HEAD) + 4 * 2 * 288 * 40)


def test_prefill(path: Path, capfd: Captured) -> None:
    run = bench(capfd, "prefill", path, "--input-len", 50, "--threads-per-rank", 2)
    assert set(run) >= PREFILL
    assert (run["tp"], run["threads_per_rank"], run["input_len"]) == (1, 2, 50)
    assert run["flops"] == 2 * 50 * 2 * LAYER + 2 * HEAD + 2 * 2 * 288 * 50 * 51
    assert run["gflops"] == pytest.approx(run["flops"] / run["ms_per_step"] / 1e6)
    assert_consistent(run, 50, 2 * (2 * LAYER + HEAD), run["flops"])


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_layouts(path: Path, capfd: Captured, kind: str) -> None:
    """An object each, in the order asked for; a single one is a list too."""
    document = bench(capfd, kind, path, "--layouts", "1x1,2x1", "--context", 16, "--input-len", 16)
    assert (set(document), document["bench"]) == ({"bench", "runs"}, kind)
    assert [(run["tp"], run["threads_per_rank"]) for run in document["runs"]] == [(1, 1), (2, 1)]
    for run in document["runs"]:
        assert set(run) >= (DECODE if kind == "decode" else PREFILL)
    one, two = document["runs"]
    flops = one.get("flops", 2 * (2 * LAYER + HEAD) + 4 * 2 * 288 * 16)
    # Nominal: the largest rank's part, times the ranks: 5 of 9 heads and 2 of 3 KV heads, and so on.
    part = open_model(str(path)).config.partition((1, 1))
    columns = 2 * 160 + 2 * 64 + 3 * max(part.mlp.sizes)
    assert max(part.mlp.sizes) > 300
    both = 2 * (2 * 2 * 64 * columns + 2 * 64 * max(part.vocab.sizes))
    read = {1: 2 * (2 * LAYER + HEAD), 2: both}
    if kind == "decode":
        read = {1: read[1] + 16 * KV_BYTES, 2: read[2] + 2 * 2 * 2 * 64 * 2 * 16}
        assert [one["bytes_per_step"], two["bytes_per_step"]] == list(read.values())
    for run in (one, two):
        assert_consistent(run, 1 if kind == "decode" else 16, read[run["tp"]], flops)
    assert "runs" in bench(capfd, kind, path, "--layouts", "1x2", "--context", 16, "--input-len", 16)


def test_tp_without_layouts(path: Path, capfd: Captured) -> None:
    run = bench(capfd, "decode", path, "-tp", 2, "--threads-per-rank", 1, "--context", 16)
    assert (run["tp"], run["threads_per_rank"]) == (2, 1)


def test_a_batch_beyond_the_token_budget(path: Path, capfd: Captured) -> None:
    words = ["--batch-size", 40, "--context", 4, "--max-num-batched-tokens", 16, "--threads-per-rank", 1]
    assert bench(capfd, "decode", path, *words)["batch_size"] == 40


def test_the_torch_backend_too(path: Path, capfd: Captured) -> None:
    run = bench(capfd, "decode", path, "--backend", "torch", "--context", 16, "--threads-per-rank", 1)
    assert run["backend"] == "torch"
    assert set(run) >= DECODE


def test_membw(capfd: Captured) -> None:
    document = bench(capfd, "membw")
    assert_sound(document)
    assert document["isa"] == _native.choose_isa()
    assert document["runs"][0]["threads"] == 1
    assert all(run["best_gbps"] >= run["membw_gbps"] for run in document["runs"])


FORMATS = {"none": ["bfloat16"] * 5, "int8": ["int8"] * 5, "int4": ["int4_min"] * 4 + ["int8"]}


@pytest.mark.parametrize("quantization", FORMATS)
def test_kernels(path: Path, capfd: Captured, quantization: str) -> None:
    document = bench(capfd, "kernels", path, "--threads-per-rank", 1, "--quantization", quantization)
    assert_sound(document)
    assert [run["format"] for run in document["runs"]] == FORMATS[quantization]
    sizes = {run["kernel"]: (run["outputs"], run["inputs"], run["leaves"]) for run in document["runs"]}
    assert sizes == {
        "qkv_proj": (480, 64, 1),
        "o_proj": (64, 288, 9),
        "gate_up_proj": (1200, 64, 1),
        "down_proj": (64, 600, 10),
        "lm_head": (449, 64, 1),
    }
    for run in document["runs"]:
        assert (run["fraction_exactness_costs"] is not None) == (run["leaves"] > 1)


def test_kernels_in_the_formats_of_a_file(tiny: Models, capfd: Captured) -> None:
    """Its own, unless the user says otherwise."""
    document = bench(capfd, "kernels", tiny.gguf("gguf-qwen3", "Q8_0"), "--threads-per-rank", 1)
    assert [run["format"] for run in document["runs"]] == ["int8"] * 5


@pytest.mark.parametrize("ranks", [(2,), (3, 2)])
def test_allreduce(capfd: Captured, ranks: tuple[int, ...]) -> None:
    document = bench(capfd, "allreduce", "--ranks", ",".join(map(str, ranks)))
    assert_sound(document)
    assert [(run["ranks"], run["bytes"]) for run in document["runs"]] == [
        (world, size) for world in ranks for size in allreduce.SIZES
    ]
    for run in document["runs"]:
        best = min(run["one_shot_us"], run["two_shot_us"], run["ring_us"])
        assert run["gloo_over_best"] == pytest.approx(run["gloo_us"] / best)


def test_tables(path: Path, capfd: Captured) -> None:
    """Without --json: a column a run, or a row a run; fractions in per cent."""
    words = ["--rounds", "1", "--threads-per-rank", "1", "--context", "16"]
    assert main(["bench", "decode", str(path), *words]) == 0
    shown = capfd.readouterr().out
    assert "fraction of limit" in shown.replace("_", " ")
    assert "%" in shown
    assert main(["bench", "kernels", str(path), *words]) == 0
    assert "down_proj" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ["KIND"]),
        (["speed"], ["speed", "membw, allreduce, kernels, decode, prefill, peers, quality"]),
        (["decode"], ["MODEL"]),
        (["kernels"], ["MODEL"]),
        (["decode", "demo", "qwen3-0.6b"], ["demo qwen3-0.6b", "one MODEL"]),
        (["decode", "PATH", "--quantization", "int3"], ["--quantization int3"]),
        (["prefill", "no-such-model"], ["no-such-model"]),
        (["decode", "qwen3-0.6b"], ["--load-format dummy"]),
        (["decode", "PATH", "--rounds", "0"], ["--rounds 0"]),
        (["decode", "PATH", "--batch-size", "0"], ["--batch-size 0"]),
        (["decode", "PATH", "--context", "-5"], ["--context -5"]),
        (["prefill", "PATH", "--input-len", "0"], ["--input-len 0"]),
        (["prefill", "PATH", "--input-len", "many"], ["--input-len many"]),
        (["decode", "PATH", "--layouts", "2"], ["--layouts 2"]),
        (["decode", "PATH", "--layouts", "1x1,2x"], ["--layouts 1x1,2x"]),
        (["decode", "PATH", "--layouts", "1x1x1"], ["--layouts 1x1x1"]),
        (["decode", "PATH", "--layouts", "0x1"], ["--tensor-parallel-size 0", "1 to 9"]),
        (["decode", "PATH", "--layouts", "1x1,10x1"], ["--tensor-parallel-size 10", "1 to 9"]),
        (["decode", "PATH", "--layouts", "1x0"], ["--threads-per-rank 0"]),
        (["decode", "PATH", "--batch-size", "9999"], ["--batch-size 9999", "--kv-cache-memory"]),
        (["decode", "PATH", "--context", "257"], ["257", "256"]),  # beyond the RoPE table
        (["prefill", "PATH", "--input-len", "257"], ["257", "256"]),
        (["decode", "PATH", "--context", "65", "--max-model-len", "64"], ["65", "64"]),
        (["decode", "PATH", "--dtype", "int3"], ["--dtype int3"]),
        (["decode", "PATH", "--rouns", "1"], ["--rouns", "--rounds"]),
        (["allreduce", "--ranks", "two"], ["--ranks two"]),
        *[(["allreduce", "--ranks", ranks], [f"--ranks {ranks}"]) for ranks in ("0", "1", "2,1", "-1", "257")],
    ],
)
def test_bad_input(path: Path, capfd: Captured, words: list[str], said: list[str]) -> None:
    """One line on stderr that says what is wrong; nothing on stdout."""
    code = main(["bench", *(str(path) if word == "PATH" else word for word in words)])
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("serried bench: error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in said), err


@pytest.mark.parametrize("text", ["", "x", "1x", "ax1", "1x1,", "1 1", "1*1", "1.5x1"])
def test_layouts_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="expected TP x threads"):
        Layout.parse_all(text)


def test_layouts_that_are_some() -> None:
    assert Layout.parse_all("1x2") == [Layout(1, 2)]
    assert Layout.parse_all("16x1,1x16,3x5") == [Layout(16, 1), Layout(1, 16), Layout(3, 5)]


# --- By hand: Qwen3-0.6B has 596,049,920 parameters, 28 layers, 16 heads of 128 on 8 KV heads, 1024 columns ---

PARAMETERS = 596_049_920
NORMS = 28 * (2 * 1024 + 2 * 128) + 1024
LAYER_WEIGHTS = 1024 * (2048 + 1024 + 1024 + 2048 + 3 * 3072)
VOCAB_WEIGHTS = 151_936 * 1024


def engine(tp: int, dtype: str = "bfloat16", sequences: int = 1) -> BenchEngine:
    """No ranks, just what is asked about them."""
    config = EngineConfig.create("qwen3-0.6b", tensor_parallel_size=tp, dtype=dtype)
    made = BenchEngine.__new__(BenchEngine)
    made.config = config
    made.model = open_model("qwen3-0.6b").config
    ranks = []
    for rank in range(tp):
        worker = Worker.__new__(Worker)
        worker.config = config
        comm: Any = SimpleNamespace(rank=rank, size=tp)
        worker.model = Decoder(made.model, made.model.partition(config.weights), comm, 1)
        ranks.append(SimpleNamespace(weight_bytes=worker.weight_bytes_per_step))
    made.executor = SimpleNamespace(ranks=ranks)  # type: ignore[assignment]
    made.requests = [None] * sequences  # type: ignore[list-item]
    return made


def test_bytes_by_hand() -> None:
    assert PARAMETERS == 28 * LAYER_WEIGHTS + VOCAB_WEIGHTS + NORMS
    assert engine(1).weight_bytes == 2 * (PARAMETERS - NORMS) == 1_191_968_768
    assert engine(1, "float32").weight_bytes == 4 * (PARAMETERS - NORMS)
    for even in (2, 4, 8):
        assert engine(even).weight_bytes >= engine(1).weight_bytes
    assert engine(2).weight_bytes == engine(1).weight_bytes
    # 3 ranks: 6, 5 and 5 heads on 3 KV heads each; 1024 columns of MLP; 792, 791 and 791 of 2374 vocabulary units.
    rank = 28 * 1024 * (2 * 6 * 128 + 2 * 3 * 128 + 3 * 1024) + 1024 * 792 * 64
    assert engine(3).weight_bytes == 3 * 2 * rank
    # 16 ranks: a head each, and each KV head twice.
    rank = 28 * 1024 * (2 * 128 + 2 * 128 + 3 * 256) + 1024 * 149 * 64
    assert engine(16).weight_bytes == 16 * 2 * rank


def test_kv_bytes_by_hand() -> None:
    per_position = 28 * 2 * 1024 * 2
    assert engine(1).kv_bytes(128) == 128 * per_position == 14_680_064
    assert engine(2, sequences=5).kv_bytes(512) == 5 * 512 * per_position
    assert engine(1, "float32").kv_bytes(1) == 2 * per_position
    assert engine(16).kv_bytes(10) == 2 * 10 * per_position


def test_flops_by_hand() -> None:
    model = open_model("qwen3-0.6b").config
    weights = 28 * LAYER_WEIGHTS + VOCAB_WEIGHTS
    assert decode_flops(model, 1, 128) == 2 * weights + 4 * 28 * 16 * 128 * 128 == 1_221_328_896
    assert decode_flops(model, 8, 512) == 8 * (2 * weights + 4 * 28 * 16 * 128 * 512)
    pairs = 512 * 513 / 2  # of a query and a position that it sees
    by_hand = 2 * 512 * 28 * LAYER_WEIGHTS + 2 * VOCAB_WEIGHTS + 4 * 28 * 16 * 128 * pairs
    assert prefill_flops(model, 512) == by_hand == 481_406_222_336
    assert prefill_flops(model, 1) == decode_flops(model, 1, 1)
