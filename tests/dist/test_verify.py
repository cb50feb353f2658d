"""`serried verify` through the command line: it holds for honest splits, and catches every kind of damage."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import Models, edited_json

from serried.cli.main import main
from serried.config import TorchrunWorld
from serried.errors import InputError
from serried.models.sabotage import in_rank_order
from serried.parallel.comm import fold_nodes
from serried.parallel.partition import ModelPartition
from serried.verify.job import VerifyJob

RUN_KEYS = {
    "tp", "ranks", "all_reduces_prefill", "collective_bytes_prefill", "max_abs_logit_diff", "bitwise_equal",
    "tokens_equal", "tokens", "max_abs_diff_reference", "rms_share_reference", "logit_std",
}  # fmt: skip
RANK_KEYS = {"parameters", "query_heads", "kv_heads", "peak_rss_bytes", "weight_bytes"}
FLOAT32 = ("--dtype", "float32", "--backend", "torch", "--threads-per-rank", "1", "--json")


class Ran:
    """What a command left behind: exit code, stdout, stderr."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def report(self) -> dict[str, Any]:
        """The one document on stdout."""
        value: dict[str, Any] = json.loads(self.out)
        return value

    def refused(self, *words: str) -> None:
        """Bad input: one line on stderr that holds these words, nothing on stdout, exit code 2."""
        assert (self.code, self.out) == (2, "")
        assert self.err.startswith("serried verify: error: ")
        assert self.err.count("\n") == 1
        for word in words:
            assert word in self.err


def verify(capfd: pytest.CaptureFixture[str], path: Path | str, *words: str) -> Ran:
    """The command in this process (its runs are processes anyway)."""
    code = main(["verify", str(path), *words])
    return Ran(code, *capfd.readouterr())


def test_it_holds_at_every_size(tiny: Models) -> None:
    """As a user runs it; the figures are those that can be counted by hand."""
    command = [sys.executable, "-m", "serried", "verify", tiny.directory("split-9-3"), *FLOAT32, "-tp", "1,2,3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert [run["tp"] for run in report["runs"]] == [1, 2, 3]
    for run in report["runs"]:
        assert_run(run)
        assert run["tokens"] == report["runs"][0]["tokens"]
    assert [sorted(rank["kv_heads"] for rank in run["ranks"]) for run in report["runs"]] == [[3], [2, 2], [1, 1, 1]]
    assert_collectives(report["runs"])
    total = sum(p.numel() for p in tiny.model("split-9-3").parameters())
    assert [rank["parameters"] for rank in report["runs"][0]["ranks"]] == [total]


def assert_run(run: dict[str, Any]) -> None:
    assert set(run) == RUN_KEYS
    assert all(set(rank) == RANK_KEYS for rank in run["ranks"])
    assert len(run["ranks"]) == run["tp"]
    assert sum(rank["query_heads"] for rank in run["ranks"]) == 9
    assert all(50 << 20 < rank["peak_rss_bytes"] < 2 << 30 for rank in run["ranks"])
    assert run["max_abs_logit_diff"] <= 1e-4
    assert run["max_abs_diff_reference"] <= 1e-4
    assert run["tokens_equal"] is True
    assert len(run["tokens"]) == 20
    assert run["logit_std"] > 0.3


def assert_collectives(runs: Sequence[dict[str, Any]]) -> None:
    """Two all-reduces a layer and one for the embedding, whatever the size; a group of one moves nothing."""
    assert [run["all_reduces_prefill"] for run in runs] == [2 * 2 + 1] * 3
    moved = [run["collective_bytes_prefill"] for run in runs]
    assert moved[0] == 0
    assert all(size >= 15 * 64 * 4 * 5 for size in moved[1:])  # prompt x hidden x float32 x all-reduces


def test_dummy_weights(tiny: Models, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A directory that holds a config alone, with weights from the seed: of the same full tensors for every split."""
    (tmp_path / "config.json").write_text((tiny.directory("split-5") / "config.json").read_text())
    options = [*FLOAT32, "--load-format", "dummy", "-tp", "1,3", "--tokens", "5", "--prompt-ids", "3,1,4,1,5"]
    ran = verify(capfd, tmp_path, *options)
    assert (ran.code, ran.report["ok"]) == (0, True)
    assert all(run["max_abs_diff_reference"] <= 1e-4 for run in ran.report["runs"])
    assert all(len(run["tokens"]) == 5 for run in ran.report["runs"])
    assert ran.report["prompt_ids"] == [3, 1, 4, 1, 5]
    verify(capfd, tmp_path, *FLOAT32).refused(str(tmp_path), "safetensors")


@pytest.mark.parametrize("kind", ["skip-reduce", "swap-shards"])
def test_a_damaged_size_alone_is_held_against_the_unsplit_model(
    tiny: Models, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """And the reference, which shares no code, takes the unsplit run's side."""
    ran = verify(capfd, tiny.directory("split-4-1"), *FLOAT32, "-tp", "2", "--sabotage", kind, "--tokens", "4")
    whole, damaged = ran.report["runs"]
    assert (ran.code, ran.report["ok"], whole["tp"], damaged["tp"]) == (1, False, 1, 2)
    assert whole["max_abs_diff_reference"] < 1e-4
    assert damaged["max_abs_logit_diff"] > 1e-2
    assert damaged["max_abs_diff_reference"] > 1e-2


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["-tp", "3"], [1, 3]),
        (["-tp", "2", "--tp-weights", "2,1"], [1, 2]),
        (["-tp", "3,2"], [3, 2]),
        (["-tp", "2,3", "--sabotage", "skip-reduce"], [1, 2, 3]),
    ],
)
def test_what_the_first_run_is(
    tiny: Models, words: list[str], sizes: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """One size alone, or only damaged ones, have the unsplit model before them."""
    ran = verify(capfd, tiny.directory("split-9-3"), *FLOAT32, *words, "--tokens", "2", "--no-reference")
    assert [run["tp"] for run in ran.report["runs"]] == sizes
    assert ran.code == ("--sabotage" in words)


def test_one_damaged_world_needs_the_reference(tiny: Models) -> None:
    world = TorchrunWorld(0, 2, 0, "127.0.0.1", 1)
    options = {"sabotage": "skip-reduce", "dtype": "float32"}
    with pytest.raises(InputError, match="--sabotage skip-reduce: there is nothing undamaged to compare with"):
        VerifyJob.create(tiny.directory("split-9-3"), options=options, world=world, with_reference=False)


def test_damage_is_caught_without_the_reference(tiny: Models, capfd: pytest.CaptureFixture[str]) -> None:
    """Against an undamaged first run, for people: a table, and a verdict that says so."""
    words = [*FLOAT32[:-1], "-tp", "1,2", "--sabotage", "skip-reduce", "--tokens", "3", "--no-reference"]
    ran = verify(capfd, tiny.directory("split-9-3"), *words)
    assert ran.code == 1
    assert "does not hold" in ran.out
    assert "skip-reduce" in ran.out


@pytest.mark.parametrize("kind", ["double-bias", "activation-first"])
def test_one_rank_is_nothing_to_damage(tiny: Models, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The first run, of one rank, is what the damaged one is compared with: it must be whole."""
    ran = verify(capfd, tiny.directory("split-4-1"), *FLOAT32, "-tp", "1,2", "--sabotage", kind, "--tokens", "3")
    first, second = ran.report["runs"]
    assert ran.code == 1
    assert second["max_abs_logit_diff"] > 1e-2
    assert first["max_abs_diff_reference"] < 1e-4


def test_nodes_in_rank_order(tiny: Models, capfd: pytest.CaptureFixture[str]) -> None:
    """The negative control: the same numbers added in another order are other bits."""
    options = [*FLOAT32, "-tp", "1,3", "--tokens", "3", "--sabotage", "rank-order"]
    ran = verify(capfd, tiny.directory("split-9-3"), *options)
    assert (ran.code, ran.report["ok"]) == (1, False)
    assert [run["bitwise_equal"] for run in ran.report["runs"]] == [True, False]
    assert ran.report["runs"][1]["max_abs_logit_diff"] < 1e-4
    plan = ModelPartition(9, 3, 32, 600, 449, (1, 1, 1)).attention.plan
    nodes = np.random.default_rng(0).standard_normal((5, sum(plan.counts), 64)).astype(np.float32)
    assert (fold_nodes(nodes, plan) != fold_nodes(nodes, in_rank_order(plan))).any()


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("split-9-3", ["-tp", "1,2", "--sabotage", "double-bias"], ["--sabotage double-bias", "no bias"]),
        ("split-9-3", ["-tp", "1,2", "--sabotage", "rank-order"], ["--sabotage rank-order", "-tp 3"]),
        ("split-9-3", ["-tp", "1", "--sabotage", "skip-reduce"], ["--sabotage skip-reduce", "two ranks"]),
        ("split-9-3", ["--sabotage", "skip-reduse"], ["--sabotage skip-reduse", "skip-reduce, swap-shards"]),
        ("split-9-3", ["-tp", "1,10"], ["--tensor-parallel-size 10", "9 query heads", "legal sizes are 1 to 9"]),
        ("llama-tied", ["-tp", "3"], ["--tensor-parallel-size 3", "legal sizes are 1 to 2"]),
        ("split-9-3", ["-tp", "0"], ["--tensor-parallel-size 0"]),
        ("split-9-3", ["-tp", "two"], ["--tensor-parallel-size two"]),
        ("split-9-3", ["-tp", "1,2,3", "--tp-weights", "2,1"], ["--tp-weights 2,1"]),
        ("split-9-3", ["--tokens", "0"], ["--tokens 0"]),
        ("split-9-3", ["--tolerance", "-1"], ["--tolerance -1"]),
        ("split-9-3", ["--tolerance", "nan"], ["--tolerance nan"]),
        ("split-9-3", ["--prompt-ids", "5,449"], ["--prompt-ids", "449"]),
        ("split-9-3", ["--prompt", "hello"], ["tokenizer"]),
        ("split-9-3", ["--load-format", "gguf"], ["--load-format gguf", "auto, dummy"]),
        ("split-9-3", ["--tokens", "250"], ["--tokens 250", "256"]),
    ],
)
def test_bad_input(
    tiny: Models, name: str, words: list[str], said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    verify(capfd, tiny.directory(name), *FLOAT32, *words).refused(*said)


def test_bfloat16_needs_a_tolerance(tiny: Models, capfd: pytest.CaptureFixture[str]) -> None:
    path = tiny.directory("split-9-3")
    verify(capfd, path, "--json", "--backend", "torch").refused("--tolerance", "bfloat16")


@pytest.mark.parametrize("damage", ["short", "unknown-key", "no-file"])
def test_a_damaged_checkpoint(tiny: Models, damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tiny.copy("split-9-3", tmp_path)
    weights = path / "model.safetensors"
    if damage == "short":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "unknown-key":
        with edited_json(path / "config.json") as config:
            config["rope_parameters"] = {"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0}
    else:
        weights.unlink()
    file = {"short": "model.safetensors", "unknown-key": "config.json", "no-file": str(path)}[damage]
    verify(capfd, path, *FLOAT32).refused(file)
