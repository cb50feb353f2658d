"""`serried bench peers`: two engines in turn, with fakes, with Serried itself, and with llama.cpp where it is there."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import Models

from serried import _native
from serried.bench import limits, peers
from serried.bench.divergence import kl_divergence
from serried.bench.peer import Peer, Setup, Task
from serried.bench.peer_file import find_file
from serried.cli.main import main
from serried.config import EngineConfig
from serried.engine.batch import build_step
from serried.engine.executor import create_executor
from serried.engine.request import Request
from serried.engine.scheduler import Scheduled
from serried.errors import InputError, RankFailed
from serried.models.registry import open_model
from serried.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not _native.available(), reason="Serried was installed without its extension")
Captured = pytest.CaptureFixture[str]

SERRIED = peers.MODULES["serried"]
LLAMA = peers.MODULES["llama_cpp"]
TASKS = (Task(1, 0, 40, 1), Task(1, 0, 1, 6), Task(3, 20, 1, 4))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that a tiny model can do, limits that take milliseconds, and fakes that a child can import."""
    monkeypatch.setattr(limits, "READ_BYTES", 8 << 20)
    monkeypatch.setattr(peers, "TASKS", TASKS)
    monkeypatch.setattr(peers, "PACKAGE", "json")  # one that is always there
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


def use(monkeypatch: pytest.MonkeyPatch, serried: str, llama: str) -> None:
    monkeypatch.setattr(peers, "MODULES", {"serried": serried, "llama_cpp": llama})


@pytest.fixture
def file(tiny: Models) -> Path:
    return tiny.gguf("gguf-qwen3", "Q8_0")


def bench(capfd: Captured, *words: object) -> dict[str, Any]:
    code = main(["bench", "peers", *map(str, words), "--rounds", "2", "--threads-per-rank", "1", "--json"])
    out, err = capfd.readouterr()
    assert code == 0, err
    document: dict[str, Any] = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return document


def setup(path: Path, **options: Any) -> Setup:
    config = EngineConfig.create(str(path), threads_per_rank=1, max_model_len=64, **options)
    return Setup(str(path), 1, config, 4, 64)


def test_figures_of_two_fakes(file: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds as the peers report their seconds; bytes by hand."""
    use(monkeypatch, "fake_peer", "fake_slow_peer")
    monkeypatch.setattr(limits.Limits, "read", lambda self: 10e9)
    document = bench(capfd, file)
    assert (document["bench"], document["threads"], document["tp"]) == ("peers", 1, 1)
    assert document["serried_version"] == document["llama_cpp_version"] == "fake 1.0 (NOTHING)"
    assert [(run["measure"], run["batch_size"], run["context"], run["new_tokens"]) for run in document["runs"]] == [
        ("prefill", 1, 0, 40),
        ("decode", 1, 0, 6),
        ("decode", 3, 20, 4),
    ]
    # Two layers of q 96 x 96, k and v 96 x 48, o, an MLP of 160, a tied embedding of 320 rows: all in Q8_0.
    matrices = 2 * 96 * (2 * 96 + 2 * 48 + 3 * 160) + 320 * 96
    cache = 2 * 2 * 48 * 2  # of a position: layers, K and V, columns, bytes
    for run, positions in zip(document["runs"], [None, 3, 3 * 22], strict=True):
        assert (run["file"], run["types"]) == (str(file), "15 Q8_0")
        assert (run["serried_tokens_per_s"], run["llama_cpp_tokens_per_s"], run["ratio"]) == (100, 25, 4)
        assert (run["serried_load_s"], run["llama_cpp_peak_rss_mib"], run["kl_divergence"]) == (0.5, 12, 0)
        ours, theirs = run["fraction_of_memory_serried"], run["fraction_of_memory_llama_cpp"]
        if positions is None:
            assert ours is theirs is None
            continue
        seconds = run["batch_size"] * run["new_tokens"] / 100
        bytes_read = run["new_tokens"] * (matrices * 34 / 32 + cache * positions)
        assert run["membw_gbps"] == 10
        assert ours == pytest.approx(4 * theirs)
        assert ours == pytest.approx(bytes_read / 10e9 / seconds)


def test_serried_as_a_peer(tiny: Models, capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real steps on one side; and two ranks of it count as two threads."""
    use(monkeypatch, SERRIED, "fake_peer")
    monkeypatch.setattr(peers, "kl_divergence", lambda theirs, ours: [theirs.size])
    document = bench(capfd, tiny.gguf("gguf-llama", "Q8_0"), "-tp", 2)
    assert (document["threads"], document["tp"]) == (2, 2)
    assert _native.choose_isa() in document["serried_version"]
    for run in document["runs"]:
        assert run["kl_divergence"] == 5  # the fake's
        assert 0 < run["serried_tokens_per_s"] < math.inf
        assert run["llama_cpp_tokens_per_s"] == 100
        assert run["serried_load_s"] > 0


def test_the_logits_of_the_serried_peer(file: Path) -> None:
    """The bits of an engine in this process, before and after timed runs."""
    prompt = [5, 3, 8, 250, 12, 9, 77]
    made = setup(file)
    executor = create_executor(made.config, open_model(str(file)))
    request = Request(0, prompt, SamplingParams(temperature=0), 0)
    request.blocks = [0]
    expected = executor.execute(build_step([Scheduled(request, 0, 7)], 32, whole_logits=True)).logits[-1]
    executor.close()
    peer = Peer("serried", SERRIED, made)
    try:
        assert np.array_equal(peer.logits(prompt), expected)
        for task in TASKS:
            assert peer.prepare(task) > 0
            assert peer.run() > 0
        assert np.array_equal(peer.logits(prompt), expected)
        assert not np.array_equal(peer.logits(prompt[:-1]), expected)
    finally:
        peer.close()


def test_a_cache_that_is_too_small(file: Path) -> None:
    peer = Peer("serried", SERRIED, setup(file, kv_cache_memory=100_000))
    with pytest.raises(InputError, match="--kv-cache-memory"):
        peer.prepare(Task(9, 32, 1, 8))
    peer.close()


@pytest.mark.parametrize("module", ["fake_peer", SERRIED])
def test_what_a_peer_refuses(tmp_path: Path, module: str) -> None:
    """The user's mistake, told in the parent as in the child."""
    with pytest.raises(InputError, match=r"refused\.gguf"):
        Peer("x", module, setup(tmp_path / "refused.gguf"))


def test_a_peer_that_raises(tmp_path: Path) -> None:
    peer = Peer("llama_cpp", "fake_peer", setup(tmp_path / "raise.gguf"), hint="; try this")
    with pytest.raises(RankFailed, match="llama_cpp: ValueError: out of fakes") as found:
        peer.prepare(TASKS[0])
    assert "in run" in found.value.traceback
    assert "try this" not in str(found.value)
    peer.close()


def test_a_peer_that_crashes(tmp_path: Path) -> None:
    peer = Peer("llama_cpp", "fake_peer", setup(tmp_path / "crash.gguf"), hint="; try this")
    with pytest.raises(RankFailed, match=r"llama_cpp: killed by SIGSEGV; try this"):
        peer.prepare(TASKS[0])
    peer.close()


def test_a_peer_gives_back_what_it_holds(tmp_path: Path) -> None:
    peer = Peer("x", "fake_peer", setup(tmp_path / "some.gguf"))
    assert not (tmp_path / "some.closed").exists()
    peer.close()
    assert (tmp_path / "some.closed").exists()


def test_presets_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the folder that was given, named after what they hold."""
    written = []

    def write(path: Path, config: Any, name: str, kind: str, seed: int, report: Any) -> None:
        written.append((path.name, config.num_layers, name, kind, seed))
        path.write_bytes(b"GGUF")

    monkeypatch.setattr("serried.bench.peer_file.write_dummy_gguf", write)
    for _ in range(2):
        with pytest.raises(InputError, match=r"qwen3-0\.6b-Q4_0-7\.gguf"):  # which holds nothing
            find_file("qwen3-0.6b:Q4_0", tmp_path, 7)
    assert written == [("qwen3-0.6b-Q4_0-7.gguf", 28, "qwen3-0.6b", "Q4_0", 7)]


def test_an_untied_embedding_is_not_read(tiny: Models, tmp_path: Path) -> None:
    """It is looked up; the LM head is multiplied."""
    found = find_file(str(tiny.gguf("gguf-llama", "Q8_0")), tmp_path, 0)
    layer = 96 * (2 * 6 * 32 + 2 * 2 * 32 + 3 * 224)
    assert found.weight_bytes == (2 * layer + 300 * 96) * 34 // 32
    assert found.types == "15 Q8_0"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["qwen3-0.6b"], ["qwen3-0.6b", "PRESET:TYPE"]),
        (["qwen3-0.6b:Q9_0"], ["qwen3-0.6b:Q9_0", "BF16, Q8_0, Q4_0, Q4_1"]),
        (["no-such:Q8_0"], ["no-such:Q8_0", "smollm2-135m"]),
        (["no-such.gguf"], ["no-such.gguf"]),
        (["FILE", "--rounds", "0"], ["--rounds 0"]),
        (["FILE", "--revision", "main"], ["--revision main"]),
        (["mistral-7b:Q8_0"], ["mistral", "llama and qwen3"]),
    ],
)
def test_bad_input(file: Path, capfd: Captured, words: list[str], said: list[str]) -> None:
    code = main(["bench", "peers", *(str(file) if word == "FILE" else word for word in words)])
    out, err = capfd.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(word in err for word in said), err


def test_a_context_too_short_for_the_tasks(file: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "TASKS", (Task(1, 250, 1, 7),))
    assert main(["bench", "peers", str(file)]) == 2
    err = capfd.readouterr().err
    assert "256" in err
    assert "257" in err


def test_without_llama_cpp(capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PACKAGE", "no_such_package")
    assert main(["bench", "peers", "demo"]) == 2
    assert "pip install 'serried[peers]'" in capfd.readouterr().err


def test_the_table(file: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "fake_peer", "fake_slow_peer")
    assert main(["bench", "peers", str(file), "--rounds", "1", "--threads-per-rank", "1"]) == 0
    shown = capfd.readouterr().out
    assert "llama_cpp: fake 1.0 (NOTHING)\n" in shown
    assert shown.count("decode") == 2


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", ["gguf-qwen3", "gguf-llama"])
def test_llama_cpp_itself(tiny: Models, capfd: Captured, name: str, kind: str) -> None:
    """It computes the same model (activations of Q8_0 are rounded to int8 by both)."""
    document = bench(capfd, tiny.gguf(name, kind))
    assert "llama-cpp-python" in document["llama_cpp_version"]
    for run in document["runs"]:
        assert run["kl_divergence"] < (1e-3 if kind == "F16" else 2e-2)
        assert run["ratio"] == pytest.approx(run["serried_tokens_per_s"] / run["llama_cpp_tokens_per_s"], rel=0.9)


def test_divergence() -> None:
    p, q = np.array([[0.5, 0.25, 0.25]]), np.array([[0.25, 0.25, 0.5]])
    shifted = (np.log(p) + 7).astype(np.float32)
    by_hand = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert kl_divergence(shifted, np.log(q).astype(np.float32)) == pytest.approx(by_hand, rel=1e-6)
    assert kl_divergence(shifted, shifted) == 0
    wide = np.array([[1e4, -1e4, 0]], np.float32)
    assert kl_divergence(wide, wide) == 0
    assert kl_divergence(wide, -wide) == pytest.approx(2e4)
