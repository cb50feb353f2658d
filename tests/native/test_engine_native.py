"""LLM on the native backend: the same tokens for every split and batch, failures that name the rank, nothing else.

What tests/dist/test_engine.py shows with the torch backend, and what is the native one's own: the instruction set,
the shared memory, what ranks do while there is nothing to do.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import engine_helpers
import pytest
from engine_helpers import PROMPTS, SAMPLED, among_others, processes, sampled, tokens
from ranks import Watch
from tiny_models import Models

from serried import LLM, SamplingParams, _native
from serried.backends import survey
from serried.engine import choice, executor, wants
from serried.errors import InputError, RankFailed
from serried.parallel import launch

ROOT = Path(__file__).parents[2]
ISAS = _native.core.cpu_isas() if _native.available() else ["none"]
# 5 heads with an MLP and a vocabulary of two units each, so that at TP = 3 a rank has none of them; 9 heads on 3.
MODELS = ("split-5", "split-9-3")
SIZES, TORCH = (1, 2, 3), 0


def open_llm(path: Path, tp: int, **options: Any) -> LLM:
    return engine_helpers.open_llm(path, tp, **{"backend": "native", **options})


# --- The same tokens everywhere ---


@pytest.fixture(scope="module", params=[(m, d) for m in MODELS for d in ("float32", "bfloat16")], ids="-".join)
def engines(request: pytest.FixtureRequest, tiny: Models) -> Iterator[dict[int, LLM]]:
    """Engines of one model, by their size, all alive at once in this process; in float32 the torch backend is 0."""
    name, dtype = request.param
    path = tiny.directory(name)
    with ExitStack() as stack:
        made = {tp: stack.enter_context(open_llm(path, tp, dtype=dtype)) for tp in SIZES}
        watches = [Watch(processes(llm).pids) for tp, llm in made.items() if tp > 1]
        if dtype == "float32":
            made[TORCH] = stack.enter_context(open_llm(path, 1, backend="torch"))
        yield made
    assert not any(watch.survivors(0) for watch in watches)


def test_greedy(engines: dict[int, LLM]) -> None:
    """Alone, in a batch, at each size, on either backend."""
    wanted = [tokens(engines[1], prompt)[0] for prompt in PROMPTS]
    assert len({*map(tuple, wanted)}) == len(PROMPTS)
    for llm in engines.values():
        assert tokens(llm, PROMPTS) == wanted
        assert tokens(llm, PROMPTS[2]) == wanted[2:3]


@pytest.mark.parametrize("kind", SAMPLED)
def test_a_seeded_request(engines: dict[int, LLM], kind: str) -> None:
    """Alone, in a batch of others with other parameters (seedless ones too), under every split, on either backend."""
    (wanted,) = tokens(engines[1], PROMPTS[0], sampled(kind))
    for llm in engines.values():
        assert tokens(llm, PROMPTS[0], sampled(kind)) == [wanted]
        assert [new.token for new in among_others(llm, sampled(kind))] == wanted
    assert tokens(engines[1], PROMPTS[0], sampled(kind, seed=12)) != [wanted]


def test_top_p_asks_for_more_candidates(engines: dict[int, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """A flat distribution: 64 candidates a rank are too few, so all ranks offer again, and the token is the right one.

    The right one: what comes out where every rank offers its whole vocabulary at once.
    """
    params = SamplingParams(temperature=5.0, top_p=0.97, seed=5, max_tokens=10, ignore_eos=True)
    rounds: list[int] = []
    gather = choice.gather_offers
    monkeypatch.setattr(choice, "gather_offers", lambda *args: rounds.append(1) or gather(*args))
    found, counts = {}, {}
    for tp, llm in engines.items():
        rounds.clear()
        found[tp] = tokens(llm, PROMPTS[0], params)
        counts[tp] = len(rounds)
    assert counts[1] > params.max_tokens, "the first candidates sufficed: the test tests nothing"
    monkeypatch.setattr(wants, "FIRST_CANDIDATES", 1 << 20)
    rounds.clear()
    assert tokens(engines[1], PROMPTS[0], params) == found[1]
    assert len(rounds) == params.max_tokens
    assert all(each == found[1] for each in found.values())
    if engines[1].source.config.vocab_size > 3 * survey.LEAF * SIZES[-1] // 2:
        assert counts[2] > params.max_tokens  # here also with real ranks


@pytest.mark.parametrize("options", [{"allreduce_algorithm": "two-shot"}, {"allreduce_algorithm": "one-shot"}], ids=str)
def test_the_algorithm_does_not_matter(tiny: Models, options: dict[str, Any]) -> None:
    path = tiny.directory("split-9-3")
    with open_llm(path, 1, dtype="bfloat16") as one, open_llm(path, 3, dtype="bfloat16", **options) as three:
        assert tokens(three, PROMPTS) == tokens(one, PROMPTS)


# --- The instruction set ---


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(tiny: Models, monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    """SERRIED_ISA forces one, on all ranks; in float32 the greedy tokens are the same ones."""
    path = tiny.directory("split-9-3")
    wanted = tokens(open_llm(path, 1), PROMPTS)
    monkeypatch.setenv("SERRIED_ISA", isa)
    with open_llm(path, 2) as llm:
        assert llm.executor.worker.backend.isa == isa
        assert loaded_kernels(processes(llm).pids[0]) == {isa}
        assert tokens(llm, PROMPTS) == wanted


def loaded_kernels(pid: int) -> set[str]:
    """The instruction sets whose kernels a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    names = {Path(line.split()[-1]).name for line in lines if "kernels_" in line}
    return {name.removeprefix("kernels_").removesuffix(".so") for name in names}


def test_ranks_agree_on_the_plainest(tiny: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose CPU has less brings the others down to its set: results are exact within one."""
    monkeypatch.setattr(executor, "child_environment", lambda: {**os.environ, "SERRIED_ISA": ISAS[0]})
    with open_llm(tiny.directory("split-9-3"), 2) as llm:
        assert llm.executor.worker.backend.isa == ISAS[0]
        tokens(llm, PROMPTS[0])
    monkeypatch.undo()
    monkeypatch.setenv("SERRIED_ISA", ISAS[0])
    monkeypatch.setattr(
        executor, "child_environment", lambda: {k: v for k, v in os.environ.items() if k != "SERRIED_ISA"}
    )
    with open_llm(tiny.directory("split-9-3"), 2) as llm:
        assert loaded_kernels(processes(llm).pids[0]) == {ISAS[0]}


@pytest.mark.parametrize("isa", ["sse9", "AVX2", "avx"])
def test_an_unknown_instruction_set(tiny: Models, monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    path = tiny.directory("split-9-3")
    monkeypatch.setenv("SERRIED_ISA", isa)
    with pytest.raises(InputError, match=f"SERRIED_ISA {isa}: this CPU and build can run {', '.join(ISAS)}"):
        open_llm(path, 2)
    words = [sys.executable, "-m", "serried", "generate", str(path), "--prompt-ids", "1,2", "--backend", "native"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert ISAS[-1] in done.stderr
    assert done.stderr.count("\n") == 1


# --- Failures ---


def fail_while_running(llm: LLM, act: Callable[[], None]) -> tuple[RankFailed, float]:
    """Let something happen in the midst of steps: the error that comes, and the seconds until it did."""
    at: list[float] = []

    def happen() -> None:
        at.append(time.monotonic())
        act()

    timer = threading.Timer(0.1, happen)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with pytest.raises(RankFailed) as caught:
        timer.start()
        while True:
            llm.generate(PROMPTS[:3], params)
    return caught.value, time.monotonic() - at[0]


@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_rank_is_named(tiny: Models, victim: int) -> None:
    llm = open_llm(tiny.directory("split-9-3"), 3)
    watch, pid = Watch(processes(llm).pids), processes(llm).pids[victim - 1]
    tokens(llm, PROMPTS[0])
    error, seconds = fail_while_running(llm, lambda: os.kill(pid, signal.SIGKILL))
    assert error.rank == victim
    assert "killed by SIGKILL" in str(error)
    assert seconds < 2
    assert not watch.survivors(0)
    with pytest.raises(RankFailed) as again:  # and it goes on saying so
        tokens(llm, PROMPTS[0])
    assert again.value.rank == victim
    llm.close()


@pytest.mark.parametrize("victim", [1, 2])
def test_a_stopped_rank_is_named(tiny: Models, victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alive but silent: --collective-timeout ends the wait; what is said is who, in which operation, for how long."""
    monkeypatch.setattr(launch, "POLITE", 0.2)  # for a stopped rank all patience is in vain
    monkeypatch.setattr(launch, "GRACE", 0.2)
    llm = open_llm(tiny.directory("split-9-3"), 3, collective_timeout=2.0)
    watch, pid = Watch(processes(llm).pids), processes(llm).pids[victim - 1]
    tokens(llm, PROMPTS[0])
    error, seconds = fail_while_running(llm, lambda: os.kill(pid, signal.SIGSTOP))
    assert error.rank == victim
    operations = ("all_reduce", "reduce_nodes", "all_gather", "gather")
    assert any(f"rank {victim}: {name} #" in str(error) for name in operations), str(error)
    assert f"of ranks 0, 1, 2: no sign of rank {victim} within 2 s" in str(error)
    assert 1.9 < seconds < 20
    assert not watch.survivors(0)
    llm.close()


SCRIPT = """
import os, sys
from serried import LLM, SamplingParams

llm = LLM(sys.argv[1], tensor_parallel_size=int(sys.argv[2]), dtype="float32", backend="native", threads_per_rank=1)
pids = llm.executor.processes.pids if int(sys.argv[2]) > 1 else []
print(*pids, flush=True)
prompt = [int(i) for i in sys.argv[3:]]
print(*llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))[0].outputs[0].token_ids)
"""
TAIL = {
    "no torch": """
heavy = {"torch", "transformers"} & set(sys.modules)
mapped = [pid for pid in [os.getpid(), *pids] if "libtorch" in open(f"/proc/{pid}/maps").read()]
print("imported:", *sorted(heavy), *mapped)
""",
    "for ever": """
while True:
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
""",
}


def script(path: Path, tp: int, tail: str = "", under: tuple[str, ...] = ()) -> list[str]:
    """The command that makes an LLM and asks it; it prints the pids of the ranks, and the tokens."""
    return [*under, sys.executable, "-c", SCRIPT + TAIL.get(tail, ""), str(path), str(tp), *map(str, PROMPTS[0])]


def test_rank_0_is_killed(tiny: Models) -> None:
    """In the midst of steps: the other ranks end by themselves."""
    command = script(tiny.directory("split-9-3"), 3, "for ever")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        watch = Watch([int(pid) for pid in process.stdout.readline().split()])
        assert process.stdout.readline()
        time.sleep(0.1)
        process.kill()
        assert not watch.survivors(2)


# --- What it takes ---


@pytest.mark.parametrize("tp", [1, 2])
def test_torch_is_never_imported(tiny: Models, tp: int) -> None:
    path = tiny.directory("split-9-3")
    done = run(script(path, tp, "no torch"))
    assert done[1].split() == [str(i) for i in tokens(open_llm(path, 1), PROMPTS[0])[0]]
    assert done[2] == "imported:"


def run(command: list[str]) -> list[str]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("options", ["size=64k", "ro,size=4k"])
def test_a_tiny_dev_shm(tiny: Models, options: str) -> None:
    """The ranks share a memfd, which takes nothing of /dev/shm: here one of 64 KiB, or one that cannot be written.

    In a mount namespace of its own, which takes root (or user namespaces): nothing outside is changed.
    """
    mount = f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"'
    under = ("unshare", "--mount", "sh", "-c", mount, "sh")
    if shutil.which("unshare") is None or subprocess.run([*under, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system in a namespace: /dev/shm stays as it is")
    path = tiny.directory("split-9-3")
    shown = subprocess.run([*under, "df", "/dev/shm"], capture_output=True, text=True, check=True)
    assert int(shown.stdout.splitlines()[1].split()[1]) <= 64  # KiB
    assert run(script(path, 3, under=under))[1].split() == [str(i) for i in tokens(open_llm(path, 1), PROMPTS[0])[0]]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_idle_ranks_sleep(tiny: Models) -> None:
    """After some steps: below 1 % of a core in every process, threads included."""
    command = [*script(tiny.directory("split-9-3"), 2), "0"]
    command[command.index("-c") + 1] = SCRIPT.replace("threads_per_rank=1", "threads_per_rank=2") + "sys.stdin.read()"
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [process.pid, *map(int, process.stdout.readline().split())]
        assert len(pids) == 2
        assert process.stdout.readline()
        time.sleep(0.3)
        before = [cpu_seconds(pid) for pid in pids]
        time.sleep(3)
        used = [cpu_seconds(pid) - seconds for pid, seconds in zip(pids, before, strict=True)]
        process.communicate("")
    assert all(seconds < 0.03 for seconds in used), used


def test_four_engines_at_once(tiny: Models) -> None:
    """Started, used and closed at the same time in one process: nothing that one does is another's."""
    names = ["split-9-3", "split-5", "split-9-3", "split-5"]
    barrier = threading.Barrier(len(names))

    def use(number: int) -> list[list[list[int]]]:
        barrier.wait()
        with open_llm(tiny.directory(names[number]), 2, seed=number) as llm:
            barrier.wait(60)
            watch = Watch(processes(llm).pids)
            found = [tokens(llm, PROMPTS), tokens(llm, PROMPTS, sampled("top_p")), tokens(llm, PROMPTS[::-1])]
        assert not watch.survivors(0)
        return found

    for name in set(names):
        tiny.directory(name)
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(use, range(len(names))))
    assert found[0] == found[2]
    assert found[1] == found[3]
    for number in (0, 1):
        with open_llm(tiny.directory(names[number]), 1) as llm:
            assert found[number][0] == tokens(llm, PROMPTS)
            assert found[number][1] == tokens(llm, PROMPTS, sampled("top_p"))
            assert found[number][2] == tokens(llm, PROMPTS[::-1])
