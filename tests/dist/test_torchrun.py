"""`serried` under the real torchrun: its world is joined, rank 0 alone prints, another size is refused."""

from __future__ import annotations

import json
import subprocess
import sys

from tiny_models import Models

from serried import LLM, SamplingParams

TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
    "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "serried",
]  # fmt: skip
FLOAT32 = ("--dtype", "float32", "--backend", "torch", "--threads-per-rank", "1", "--json")


def torchrun(*words: object) -> subprocess.CompletedProcess[str]:
    command = [*TORCHRUN, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_verify(tiny: Models) -> None:
    """One run with two ranks; the unsplit run is the reference decoder."""
    done = torchrun("verify", tiny.directory("split-9-3"), *FLOAT32)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (run,) = report["runs"]
    assert (report["ok"], run["tp"], len(run["ranks"])) == (True, 2, 2)
    assert sum(rank["query_heads"] for rank in run["ranks"]) == 9
    assert run["max_abs_diff_reference"] <= 1e-4
    assert run["collective_bytes_prefill"] > 0


def test_another_size_is_refused(tiny: Models) -> None:
    """Said once, by rank 0; torchrun itself exits with 1 for any failure of a rank."""
    done = torchrun("verify", tiny.directory("split-9-3"), *FLOAT32, "-tp", "3")
    assert (done.returncode != 0, done.stdout) == (True, "")
    said = [line for line in done.stderr.splitlines() if line.startswith("serried verify: error:")]
    assert len(said) == 1
    assert "--tensor-parallel-size 3" in said[0]
    assert "torchrun started 2 ranks" in said[0]
    assert "exitcode  : 2" in done.stderr


def test_generate(tiny: Models) -> None:
    """Rank 0 alone prints, and what it prints is the answer of one rank."""
    path = tiny.directory("split-9-3")
    done = torchrun("generate", path, *FLOAT32, "--prompt-ids", "5,6,7", "--max-tokens", 9, "--ignore-eos")
    assert done.returncode == 0, done.stderr
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    (alone,) = LLM(str(path), dtype="float32", backend="torch").generate([5, 6, 7], params)
    assert [output["token_ids"] for output in json.loads(done.stdout)["outputs"]] == [alone.outputs[0].token_ids]
