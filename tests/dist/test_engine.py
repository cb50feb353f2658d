"""LLM over real ranks: the same tokens for every split and batch, failures that name the rank, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import engine_helpers
import layer_worker
import msgspec
import numpy as np
import pytest
import torch
from engine_helpers import GREEDY, PROMPTS, SAMPLED, among_others, processes, sampled, tokens
from ranks import Watch, start
from tiny_models import Models

from serried import LLM, SamplingParams
from serried.backends.step import StepInput
from serried.errors import InputError, RankFailed
from serried.parallel.launch import RankProcesses
from serried.parallel.link import Kind, pack_frame

# 5 heads with an MLP and a vocabulary of two units each, so that at TP = 3 a rank has none; 9 heads on 3; 4 heads on 1.
MODELS = {"split-5": (1, 2, 3), "split-9-3": (1, 2, 3), "split-4-1": (1, 3)}


def open_llm(path: Path, tp: int, **options: Any) -> LLM:
    return engine_helpers.open_llm(path, tp, "torch", **options)


def watch(llm: LLM) -> Watch:
    return Watch(processes(llm).pids)


@pytest.fixture(scope="module", params=MODELS)
def engines(request: pytest.FixtureRequest, tiny: Models) -> Iterator[dict[int, LLM]]:
    """Engines of one model, by their size, all alive at once in this process."""
    path = tiny.directory(request.param)
    made = {tp: open_llm(path, tp) for tp in MODELS[request.param]}
    watches = [watch(llm) for tp, llm in made.items() if tp > 1]
    yield made
    for llm in made.values():
        llm.close()
        llm.close()  # may be called again
    assert not any(w.survivors(0) for w in watches)


def test_greedy_tokens_are_those_of_one_rank(engines: dict[int, LLM]) -> None:
    found = {tp: tokens(llm, PROMPTS, GREEDY) for tp, llm in engines.items()}
    assert len({*map(tuple, found[1])}) == len(PROMPTS)
    assert all(each == found[1] for each in found.values())


@pytest.mark.parametrize("kind", [kind for kind in SAMPLED if kind != "top_k"])  # `all` has it
def test_a_seeded_request_is_the_same_everywhere(engines: dict[int, LLM], kind: str) -> None:
    """Alone, in a batch of others with other parameters (seedless ones too), and under every split."""
    (wanted,) = tokens(engines[1], PROMPTS[0], sampled(kind))
    for llm in engines.values():
        assert tokens(llm, PROMPTS[0], sampled(kind)) == [wanted]
        assert [new.token for new in among_others(llm, sampled(kind))] == wanted
    assert tokens(engines[1], PROMPTS[0], sampled(kind, seed=12)) != [wanted]


def test_logprobs_are_those_of_one_rank(engines: dict[int, LLM]) -> None:
    """Of prompts in chunks, and of the answer; PyTorch's own products may depend on their number of rows."""
    params = sampled("edited", logprobs=3, prompt_logprobs=2)
    wanted = engines[1].generate(PROMPTS, params)
    for llm in engines.values():
        for output, other in zip(llm.generate(PROMPTS, params), wanted, strict=True):
            assert output.prompt_logprobs is not None
            assert other.prompt_logprobs is not None
            assert_near(output.prompt_logprobs, other.prompt_logprobs)
            assert_near(output.outputs[0].logprobs, other.outputs[0].logprobs)


def assert_near(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if one is None or other is None:
            assert one is other is None
            continue
        assert {i: each.rank for i, each in one.items()} == {i: each.rank for i, each in other.items()}
        assert all(abs(one[i].logprob - other[i].logprob) < 1e-5 for i in one)


def test_without_a_seed_requests_differ(engines: dict[int, LLM]) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    assert len({*map(tuple, tokens(engines[1], [PROMPTS[0]] * 4, params))}) == 4


def test_ranks_hold_their_share(engines: dict[int, LLM]) -> None:
    config = engines[1].source.config
    for tp, llm in engines.items():
        ranks = llm.executor.ranks
        assert len(ranks) == tp
        assert sum(rank.query_heads for rank in ranks) == config.num_heads
        assert all(1 <= rank.kv_heads <= config.num_kv_heads for rank in ranks)


def test_weighted_ranks(tiny: Models) -> None:
    """3 to 1: rank 0 holds most heads, and the tokens are the same."""
    path = tiny.directory("split-9-3")
    with open_llm(path, 2, tp_weights=(3, 1)) as llm:
        assert [rank.query_heads for rank in llm.executor.ranks] == [7, 2]
        assert tokens(llm, PROMPTS, GREEDY) == tokens(open_llm(path, 1), PROMPTS, GREEDY)


def test_made_in_a_thread_that_ends(tiny: Models) -> None:
    """Ranks die with the process, not with the thread that started them (PR_SET_PDEATHSIG looks at the thread)."""
    path = tiny.directory("split-9-3")
    with ThreadPoolExecutor(1) as pool:
        llm = pool.submit(open_llm, path, 2).result()
    with llm:
        assert tokens(llm, PROMPTS, GREEDY) == tokens(open_llm(path, 1), PROMPTS, GREEDY)


def stream(llm: LLM) -> Iterator[Any]:
    return llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))


def assert_is_over(llm: LLM, watched: Watch, rank: int) -> None:
    """No process is left, and the engine goes on saying so."""
    assert not watched.survivors(0)
    with pytest.raises(RankFailed) as again:
        llm.generate(PROMPTS[0], GREEDY)
    assert again.value.rank == rank
    llm.close()


def test_a_killed_rank_is_named(tiny: Models) -> None:
    llm = open_llm(tiny.directory("split-9-3"), 3)
    watched, pieces = watch(llm), stream(llm)
    next(pieces)
    os.kill(processes(llm).pids[1], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RankFailed, match="rank 2: killed by SIGKILL"):
        list(pieces)
    assert time.monotonic() - started < 5
    assert_is_over(llm, watched, 2)


def test_an_exception_in_a_ranks_forward_is_named(tiny: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is handed a step with a cache slot that does not exist; rank 0 and 2 get the right one."""
    llm = open_llm(tiny.directory("split-9-3"), 3)
    watched, pieces = watch(llm), stream(llm)
    next(pieces)
    monkeypatch.setattr(processes(llm), "broadcast", lambda frame, timeout: send_bad_slot(processes(llm), frame))
    started = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1: IndexError") as caught:
        list(pieces)
    assert time.monotonic() - started < 5
    assert "index_copy_" in caught.value.traceback
    monkeypatch.undo()
    assert_is_over(llm, watched, 1)


def send_bad_slot(ranks: RankProcesses, frame: bytes) -> None:
    bad = np.frombuffer(frame, np.int32).copy()
    bad[len(fields(StepInput)) + bad[:2].sum()] = 1 << 30  # the first slot
    for rank in ranks._ranks:
        rank.socket.sendall(pack_frame(Kind.DATA, bad.tobytes() if rank.rank == 1 else frame))


def test_a_model_that_cannot_be_split_starts_nothing(tiny: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serried.engine.executor.RankProcesses", None)
    with pytest.raises(InputError, match=r"--tensor-parallel-size 6: .*5 query heads; legal sizes are 1 to 5"):
        open_llm(tiny.directory("split-5"), 6)


def test_a_bad_weight_is_bad_input_at_every_size(tiny: Models, tmp_path: Path) -> None:
    """All ranks find it at once; what the user gets is the one line, and no process is left."""
    from safetensors.torch import load_file, save_file

    path = tiny.copy("split-9-3", tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(65)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    children = set(child_pids())
    with pytest.raises(InputError, match=r"model.safetensors: tensor model.norm.weight has shape \[65\]"):
        open_llm(path, 2)
    assert set(child_pids()) <= children


def child_pids() -> list[str]:
    return Path("/proc/self/task").joinpath(str(os.getpid()), "children").read_text().split()


SCRIPT = """
import sys
from serried import LLM, SamplingParams

llm = LLM(sys.argv[1], tensor_parallel_size=2, dtype="float32", backend="torch", threads_per_rank=1)
print(*llm.executor.processes.pids)
params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
print(*llm.generate([[int(i) for i in sys.argv[2:]]], params)[0].outputs[0].token_ids)
"""


def test_a_script_needs_no_main_guard(tiny: Models, tmp_path: Path) -> None:
    """And no close(): the ranks end with the process."""
    path = tiny.directory("split-9-3")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, path, *map(str, PROMPTS[0])]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    pids, answer = done.stdout.splitlines()
    assert answer.split() == [str(i) for i in tokens(open_llm(path, 1), PROMPTS[0], GREEDY)[0]]
    assert not [pid for pid in pids.split() if Path("/proc", pid).exists()]


@pytest.fixture(scope="module")
def layer_world() -> Iterator[tuple[RankProcesses, Any]]:
    """Three ranks, of which this process is the first, for layers without a model around them."""
    from serried.parallel.torch_comm import TorchComm, anonymous_store

    with start("layer_worker", 3) as ranks:
        comm = TorchComm(anonymous_store(ranks.store_fd, 3), 0, 3, timeout=30.0, loopback=True, watch=ranks.check)
        ranks.wait_ready()
        yield ranks, comm
        comm.close()


CHECKS = ("column_parallel", "row_parallel", "merged_column_parallel", "qkv_parallel", "embedding", "lm_head")


@pytest.mark.parametrize("check", CHECKS)
def test_a_layer_on_its_own(layer_world: tuple[RankProcesses, Any], check: str) -> None:
    ranks, comm = layer_world
    ranks.broadcast(msgspec.msgpack.encode(check))
    getattr(layer_worker, check)(comm)
    for rank in range(1, 3):
        verdict = ranks.recv(rank).decode()
        assert not verdict, f"rank {rank}:\n{verdict}"
