"""`serried quantize` as a user meets it: what it writes loads as it is, and is what --quantization makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TEXT, Models, edited_json

from serried._native import available
from serried.cli.main import main
from serried.models.hf_config import config_from_hf
from serried.models.hf_writer import hf_from_config
from serried.models.registry import open_model
from serried.text.tokenizer import Tokenizer
from serried.weights.safetensors import SafetensorsCheckpoint

PLAIN = ("--dtype", "float32", "--backend", "torch", "--threads-per-rank", "1")
IDS = ("--prompt-ids", "5,6,7,8,9", "--max-tokens", "12", "--ignore-eos", "--json")
Captured = pytest.CaptureFixture[str]


def serried(capfd: Captured, *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    return code, *capfd.readouterr()


def document(capfd: Captured, *words: object) -> Any:
    code, out, err = serried(capfd, *words)
    assert code == 0, err
    return json.loads(out)


def refused(capfd: Captured, *words: object) -> str:
    """Bad input: the one line on stderr; nothing on stdout, exit code 2."""
    code, out, err = serried(capfd, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


def tokens(capfd: Captured, model: object, *words: object) -> list[int]:
    (output,) = document(capfd, "generate", *PLAIN, model, *IDS, *words)["outputs"]
    return output["token_ids"]


@pytest.mark.parametrize(
    ("name", "to"), [("split-9-3", "int8"), ("split-9-3", "int4"), ("llama-untied", "int4"), ("llama-shards", "int8")]
)
def test_a_directory(tiny: Models, name: str, to: str, tmp_path: Path, capfd: Captured) -> None:
    """The tokens of --quantization, from a file of half or a third of the size, at any split."""
    source, directory = tiny.directory(name), tmp_path / "out"
    said = document(capfd, "quantize", source, "--to", to, "-o", directory, "--json")
    assert said["directory"] == str(directory)
    assert said["bytes"] == (directory / "model.safetensors").stat().st_size
    assert f"F32 -> {'int8' if to == 'int8' else 'int4 with minimum'}" in said["tensors"]
    wanted = tokens(capfd, source, "--quantization", to)
    assert tokens(capfd, directory) == wanted
    assert tokens(capfd, directory, "-tp", 1 + (name == "split-9-3")) == wanted
    assert tokens(capfd, directory, "--quantization", "none") == wanted
    whole = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    assert said["bytes"] < (0.4 if to == "int8" else 0.35) * whole


def test_its_values_are_those_of_quantizing_while_loading(tiny: Models, tmp_path: Path, capfd: Captured) -> None:
    assert serried(capfd, "quantize", tiny.directory("split-9-3"), "--to", "int8", "-o", tmp_path / "a")[0] == 0
    again = document(capfd, "quantize", tmp_path / "a", "--to", "int8", "-o", tmp_path / "b", "--json")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert files[0] == files[1]  # blocks are copied
    assert "int8 -> int8" in again["tensors"]
    checkpoint = SafetensorsCheckpoint(tmp_path / "a")
    kept = {info.format for name, info in checkpoint.tensors.items() if name.endswith("proj.weight")}
    assert kept == {"int8"}
    assert {info.format for name, info in checkpoint.tensors.items() if "norm" in name} == {"F32"}


def test_what_stands_beside_is_copied(tiny: Models, tmp_path: Path, capfd: Captured) -> None:
    """Text in, text out; for people a line that says what became what."""
    path = tiny.directory("split-text")
    code, out, _ = serried(capfd, "quantize", path, "--to", "int8", "-o", tmp_path / "out")
    assert code == 0
    assert out.startswith(f"{tmp_path / 'out'}: {path} in int8, ")
    assert "F32 -> int8" in out
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (path / name).read_bytes()
    said = document(capfd, "generate", *PLAIN, tmp_path / "out", TEXT[0], "--max-tokens", 5, "--json")
    assert said["usage"]["completion_tokens"] >= 1


@pytest.mark.parametrize("kind", ["Q4_1", "F32"])
@pytest.mark.parametrize("name", ["gguf-llama", "gguf-rope3", "gguf-qwen3"])
def test_a_gguf_file(tiny: Models, name: str, kind: str, tmp_path: Path, capfd: Captured) -> None:
    """Config and tokenizer come out of the metadata; blocks of the right kind are copied."""
    path, directory = tiny.gguf(name, kind), tmp_path / "out"
    said = document(capfd, "quantize", path, "--to", "int4", "-o", directory, "--json")
    assert f"{kind} -> int4 with minimum" in said["tensors"]
    assert tokens(capfd, directory) == tokens(capfd, path, "--quantization", "int4")
    before, after = open_model(str(path)), open_model(str(directory))
    for field in ("vocab_size", "head_dim", "rope", "norm_eps", "tied", "bos_id", "max_position"):
        assert getattr(after.config, field) == getattr(before.config, field)
    tokenizers = [Tokenizer.from_gguf(before.gguf.metadata), Tokenizer.from_directory(directory)]  # type: ignore[union-attr]
    for text in (*TEXT, "tabs\tand\nlines <|im_end|>", "é"):
        assert tokenizers[0].encode(text) == tokenizers[1].encode(text)
    for what in ("bos_id", "eos_ids", "control_ids", "chat_template", "vocab_size"):
        assert getattr(tokenizers[0], what) == getattr(tokenizers[1], what)


def test_dummy_weights(tiny: Models, tmp_path: Path, capfd: Captured) -> None:
    (tmp_path / "config.json").write_text((tiny.directory("split-5") / "config.json").read_text())
    options = ("--load-format", "dummy", "--seed", 7)
    code, _, err = serried(capfd, "quantize", tmp_path, "--to", "int8", "-o", tmp_path / "out", *options)
    assert code == 0
    assert "takes token ids only" in err
    assert tokens(capfd, tmp_path / "out") == tokens(capfd, tmp_path, "--quantization", "int8", *options)


@pytest.mark.skipif(not available(), reason="Serried was installed without its extension")
def test_verify_holds(tiny: Models, tmp_path: Path, capfd: Captured) -> None:
    """On the native backend: the same bits at each size, near the reference, and damage is far from it."""
    path = tmp_path / "out"
    assert serried(capfd, "quantize", tiny.directory("split-9-3"), "--to", "int4", "-o", path)[0] == 0
    words = ("verify", path, "--tokens", 4, "--threads-per-rank", 1)
    report = document(capfd, *words, "-tp", "1,2,3", "--json")
    assert (report["ok"], report["quantization"]) == (True, None)
    assert report["weights"] == "14 int4_min -> int4 with minimum, 9 F32 -> float32, 1 int8 -> int8"
    assert (report["reference_tolerance"], report["reference_share_tolerance"]) == (None, 0.25)
    for run in report["runs"]:
        assert run["bitwise_equal"]
        assert 1e-3 < run["rms_share_reference"] < 0.05
    code, out, _ = serried(capfd, *words, "-tp", "1,2")
    assert code == 0
    assert "weights: 14 int4_min -> int4 with minimum" in out.replace("\n", " ")
    for kind in ("skip-reduce", "swap-shards"):  # one run: only the reference can tell
        code, out, _ = serried(capfd, *words, "-tp", "2", "--sabotage", kind, "--json")
        assert (code, json.loads(out)["ok"]) == (1, False)
        assert json.loads(out)["runs"][0]["rms_share_reference"] > 0.25


@pytest.mark.skipif(not available(), reason="Serried was installed without its extension")
def test_the_log_says_what_became_what(tiny: Models, capfd: Captured) -> None:
    """A line on stderr, of rank 0 alone; none where nothing is quantized."""
    path = tiny.gguf("gguf-llama", "Q5_0")
    for tp in (1, 2):
        code, out, err = serried(capfd, "generate", path, *IDS, "-tp", tp, "--threads-per-rank", 1)
        assert code == 0
        assert json.loads(out)
        assert err == f"[rank 0] {path}: 16 Q5_0 -> int8, 5 F32 -> float32\n"
    assert serried(capfd, "generate", tiny.gguf("gguf-llama", "F16"), *IDS)[2] == ""


def test_bad_input(tiny: Models, tmp_path: Path, capfd: Captured) -> None:
    path = tiny.directory("split-9-3")
    assert "--to int3: choose from int8, int4" in refused(capfd, "quantize", path, "--to", "int3", "-o", tmp_path / "a")
    assert "--output" in refused(capfd, "quantize", path, "--to", "int8")
    assert "exists already" in refused(capfd, "quantize", path, "--to", "int8", "-o", path)
    assert "--load-format dummy" in refused(capfd, "quantize", "qwen3-0.6b", "--to", "int8", "-o", tmp_path / "a")
    said = refused(capfd, "generate", path, "--quantization", "awq", *IDS)
    assert "--quantization awq: unknown; choose from none, int8, int4" in said
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(capfd, "quantize", path, "--to", "int8", "-o", tmp_path / "file" / "a")


def test_nothing_is_left_of_a_failure(tiny: Models, tmp_path: Path, capfd: Captured) -> None:
    source = tiny.copy("split-9-3", tmp_path)
    with edited_json(source / "config.json") as config:
        config["num_hidden_layers"] = 3
    assert "is missing" in refused(capfd, "quantize", source, "--to", "int8", "-o", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_what_others_have_quantized(tiny: Models, method: str, tmp_path: Path, capfd: Captured) -> None:
    """By its name, with what would work."""
    path = tiny.copy("split-9-3", tmp_path)
    with edited_json(path / "config.json") as config:
        config["quantization_config"] = {"quant_method": method, "bits": 4}
    for command in (("generate", path, *IDS), ("quantize", path, "--to", "int8", "-o", tmp_path / "out")):
        said = refused(capfd, *command)
        assert f"config.json: quantization_config: quant_method '{method}' is not supported" in said
        assert "--quantization int4" in said


@pytest.mark.parametrize("name", ["llama-rope3", "llama-biases", "qwen3-tied", "gguf-rope3"])
def test_a_config_is_written_and_read(tiny: Models, name: str) -> None:
    paths = [tiny.directory(name)] + ([tiny.gguf(name)] if name.startswith("gguf") else [])
    for path in paths:
        config = open_model(str(path)).config
        assert config_from_hf(json.loads(json.dumps(hf_from_config(config, "here"))), "here") == config


def test_a_damaged_scale_is_named(tiny: Models, tmp_path: Path, capfd: Captured) -> None:
    path = tmp_path / "out"
    assert serried(capfd, "quantize", tiny.directory("split-9-3"), "--to", "int8", "-o", path)[0] == 0
    file = path / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b"o_proj.weight_scale", b"o_proj.weight_xcale", 1))
    said = refused(capfd, "generate", path, *IDS)
    assert str(file) in said
    assert "o_proj.weight_scale': is missing" in said
