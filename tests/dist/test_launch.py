"""Starting, watching and ending ranks; these need no PyTorch and start in a tenth of a second."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from ranks import HERE, Watch, start

from serried.errors import InputError, RankFailed
from serried.parallel import launch
from serried.parallel.link import ChildLink, FrameReader, Kind, pack_frame


def test_frames_cut_anywhere() -> None:
    stream = b"".join(pack_frame(Kind.DATA, bytes(n)) for n in (0, 1, 300)) + pack_frame(Kind.READY, b"")
    reader = FrameReader()
    found = [frame for i in range(len(stream)) for frame in reader.feed(stream[i : i + 1])]
    assert [(kind, len(body)) for kind, body in found] == [(0, 0), (0, 1), (0, 300), (1, 0)]


def test_eight_ranks_hear_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "POLITE", 30.0)
    with start("link_worker", 8, do="echo") as ranks:
        watch = Watch(ranks.pids)
        ranks.wait_ready(30)
        for rank in range(1, 8):
            assert msgspec.msgpack.decode(ranks.recv(rank)) == [rank, 8, "1", True]
        for frame in (b"", b"step", os.urandom(3_000_000)):
            ranks.broadcast(frame)
            assert all(ranks.recv(rank) == frame for rank in range(1, 8))
        ranks.check()
        started = time.monotonic()
        ranks.close()
        assert time.monotonic() - started < 20  # they end by themselves
        assert not watch.survivors(0)
    ranks.close()


def test_a_set_of_one_rank() -> None:
    with start("link_worker", 1, do="echo") as ranks:
        ranks.wait_ready(0)
        ranks.broadcast(b"nobody")
        ranks.check()
        assert ranks.pids == []


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(
    ("do", "reason", "trace"),
    [
        ("raise", "ArithmeticError: no such tensor", 'raise ArithmeticError("no such tensor")'),
        ("exit", "exited with status 7 before it was ready", ""),
    ],
)
def test_failure_at_start(rank: int, do: str, reason: str, trace: str) -> None:
    with start("link_worker", 3, do=do, rank=rank) as ranks:
        watch = Watch(ranks.pids)
        with pytest.raises(RankFailed) as caught:
            ranks.wait_ready(30)
    assert (caught.value.rank, caught.value.reason) == (rank, reason)
    assert trace in caught.value.traceback
    assert not watch.survivors(0)


@pytest.mark.parametrize("module", ["broken_worker", "no_such_worker"])
def test_a_module_that_cannot_be_imported(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed) as caught, start(module, 2) as ranks:
        ranks.wait_ready(30)
    assert caught.value.rank == 1
    assert "exited with status 1 before it was ready" in caught.value.reason
    assert "No module named" in caught.value.traceback
    assert "[rank 1]" in capsys.readouterr().err


def test_not_ready_in_time() -> None:
    with (
        start("link_worker", 3, do="stuck", rank=2) as ranks,
        pytest.raises(RankFailed, match=r"rank 2: not ready after 1.5 s \(waited for: 2\)"),
    ):
        ranks.wait_ready(1.5)


def test_a_rank_that_does_not_listen() -> None:
    with start("link_worker", 3, do="deaf", rank=1) as ranks:
        ranks.wait_ready(30)
        with pytest.raises(RankFailed, match=r"rank 1: took no step for 0.5 s"):
            ranks.broadcast(bytes(5_000_000), timeout=0.5)
        with pytest.raises(RankFailed, match=r"rank 1: sent nothing for 0.1 s"):
            ranks.recv(1, timeout=0.1)


def test_a_rank_killed_between_steps() -> None:
    with start("link_worker", 3, do="echo") as ranks:
        ranks.wait_ready(30)
        ranks.check()
        os.kill(ranks.pids[1], signal.SIGKILL)
        seen = RankFailed(0, "all_reduce #1: connection closed by peer")
        error = ranks.failure(seen, after=10)
        assert (error.rank, error.reason) == (2, "killed by SIGKILL (out of memory, or by hand)")
        for call in (ranks.check, lambda: ranks.broadcast(b"step")):
            with pytest.raises(RankFailed, match="rank 2: killed by SIGKILL"):
                call()


def test_no_culprit() -> None:
    """Where nobody died or reported, what rank 0 saw is all that is known."""
    with start("link_worker", 2, do="echo") as ranks:
        ranks.wait_ready(30)
        seen = RankFailed(1, "no sign of rank 1")
        assert ranks.failure(seen, after=0.1) is seen


def test_output_comes_in_whole_lines_with_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with start("link_worker", 3, do="talk") as ranks:
        ranks.wait_ready(30)
    captured = capsys.readouterr()
    assert captured.out == ""
    expected = [f"[rank {r}] {text}" for r in (1, 2) for text in ("and no end", "one line", "two")]
    assert sorted(captured.err.splitlines()) == expected


def test_ranks_outlive_the_thread_that_started_them() -> None:
    """PR_SET_PDEATHSIG fires when a thread ends: here the thread of a pool does."""
    with ThreadPoolExecutor(1) as pool:
        ranks = pool.submit(start, "link_worker", 3, do="echo").result()
        pool.submit(ranks.wait_ready, 30).result()
    with ranks:
        ranks.broadcast(b"still there?")
        for rank in (1, 2):
            ranks.recv(rank)
            assert ranks.recv(rank) == b"still there?"


def test_nothing_is_left_of_a_set_that_is_forgotten() -> None:
    before = set(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208
    ranks = start("link_worker", 3, do="echo")
    watch = Watch(ranks.pids)
    del ranks
    gc.collect()
    assert not watch.survivors(0)
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before  # noqa: PTH208


@pytest.mark.parametrize("how", ["forget", "SIGKILL", "SIGINT", "SIGTERM", "stuck", "early"])
def test_ranks_end_with_their_parent(how: str) -> None:
    """At exit, and killed: with idle ranks, with ranks stuck in a call or still starting."""
    script = subprocess.Popen(
        [sys.executable, HERE / "parent_script.py", how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    with script:
        assert script.stdout is not None
        line = script.stdout.readline()
        if how == "forget":
            assert script.wait(10) == 0
            assert not [pid for pid in line.split() if os.path.exists(f"/proc/{pid}")]  # noqa: PTH110
            return
        watch = Watch([int(pid) for pid in line.split()])
        script.send_signal(signal.SIGKILL if how in {"stuck", "early"} else signal.Signals[how])
        _, errors = script.communicate(timeout=10)
    assert not watch.survivors(5)
    assert "[rank" not in errors


def test_a_rank_started_by_hand() -> None:
    with pytest.raises(InputError, match="started by rank 0"):
        ChildLink.from_argv(["1", "2"])
