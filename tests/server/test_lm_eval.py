"""lm_eval scores the server as it does others: the same for one rank and two, by token ids and by text."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from needs import need
from serving import address, process, wait_until_ready
from tiny_models import TEXT, Models

from serried import LLM, SamplingParams, _native

need("lm_eval")
SCRIPT = Path(__file__).with_name("lm_eval_script.py")
OPTIONS = ["--dtype", "float32", "--threads-per-rank", "1", "--block-size", "8", "--served-model-name", "tiny"]
ITEMS = 20
# JSON is YAML too.
CHOICES = {
    "task": "choices",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
WORDS = {
    "task": "words",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{question}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}
PROSE = {
    "task": "prose",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "word_perplexity"}],
}


@pytest.fixture(scope="module")
def items() -> list[dict[str, Any]]:
    words = " ".join(TEXT).split()
    chance = random.Random(7)

    def some(least: int, most: int) -> str:
        return " ".join(chance.choices(words, k=chance.randint(least, most)))

    return [
        {"question": some(3, 9), "choices": [some(1, 3) for _ in range(4)], "answer": chance.randrange(4)}
        for _ in range(ITEMS)
    ]


@pytest.fixture(scope="module")
def found(items: list[dict[str, Any]], tiny: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What lm_eval says of a server with one rank, of one with two, and of this one asked by text instead of ids."""
    folder, model = tmp_path_factory.mktemp("tasks"), tiny.directory("split-text")
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "items.jsonl")}}}
    for task in (CHOICES, WORDS, PROSE):
        (folder / f"{task['task']}.yaml").write_text(json.dumps({**task, **data, "test_split": "test"}))
    with ExitStack() as stack:
        key = ["--api-key", "secret", "--no-access-log"]
        servers = [stack.enter_context(process(str(model), "-tp", str(tp), *OPTIONS, *key)) for tp in (1, 2)]
        urls = [address(server) for server in servers]
        for url, server in zip(urls, servers, strict=True):
            wait_until_ready(url, server, "secret")
        runs = [
            {"url": urls[0], "tasks": ["choices", "words", "prose"], "batch_size": 4},
            {"url": urls[1], "tasks": ["choices", "words", "prose"], "num_concurrent": 3},
            # Of prose lm_eval's text begins with BOS spelled out, which for us is text (docs/text.md).
            {"url": urls[1], "tasks": ["choices", "words"], "num_concurrent": 3, "tokenized_requests": False},
        ]
        command = [sys.executable, str(SCRIPT), str(folder), str(model), json.dumps(runs)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        yield json.loads(line.removeprefix("RESULT "))


def test_one_rank_and_two_have_the_same_scores(found: Any) -> None:
    one = found[0]
    assert len(one["samples"]["choices"]) == len(one["samples"]["prose"]) == ITEMS
    assert any(response[0] for sample in one["samples"]["words"] for response in sample)
    for other in found[1:]:
        for metric in ("acc,none", "acc_norm,none"):
            assert other["results"]["choices"][metric] == one["results"]["choices"][metric]
        if _native.available():  # not only the scores: every log-probability that they come from, bit by bit
            assert other["samples"] == {task: one["samples"][task] for task in other["samples"]}


def test_they_are_what_the_engine_says(found: Any, items: list[dict[str, Any]], tiny: Models) -> None:
    """Log-probabilities of a choice, as its tokens have them after the question in one process without a server."""
    path = str(tiny.directory("split-text"))
    with LLM(path, dtype="float32", threads_per_rank=1, block_size=8) as llm:
        tokenizer = llm.tokenizer
        assert tokenizer is not None
        for item, sample in zip(items[:5], found[0]["samples"]["choices"], strict=False):
            for choice, (response,) in zip(item["choices"], sample, strict=True):
                start = tokenizer.encode(item["question"], add_special=False)
                whole = tokenizer.encode(f"{item['question']} {choice}", add_special=False)
                assert whole[: len(start)] == start
                (output,) = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=1))
                scores = [next(iter(each.values())) for each in (output.prompt_logprobs or [])[len(start) :] if each]
                assert response[0] == pytest.approx(sum(score.logprob for score in scores), abs=1e-4)
                assert response[1] == all(score.rank == 1 for score in scores)
