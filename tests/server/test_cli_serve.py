"""The options of `serried serve`: the command line, the environment, a YAML file; and completion in a shell."""

from __future__ import annotations

import json
import shutil
import subprocess
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from serried import config as environment
from serried.cli import completion, serve
from serried.cli.layers import fill
from serried.cli.main import COMMANDS, Parser
from serried.errors import InputError
from serried.server.options import ServerConfig

VALUES: dict[str, tuple[str, Any]] = {
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("9", 9),
    "api_key": ("k", ("k",)),
    "served_model_name": ("a", ("a",)),
    "chat_template": ("{{ x }}", "{{ x }}"),
    "allowed_chat_template_kwargs": ("thinking", ("thinking",)),
    "trust_request_chat_template": ("", True),
    "skip_tokenizer_init": ("", True),
    "tool_call_parser": ("hermes", "hermes"),
    "reasoning_parser": ("none", "none"),
    "ssl_keyfile": (__file__, __file__),
    "ssl_certfile": (__file__, __file__),
    "ssl_ca_certs": (__file__, __file__),
    "allowed_origins": ('["http://a", "http://b"]', ("http://a", "http://b")),
    "max_n": ("3", 3),
    "max_stop_strings": ("3", 3),
    "max_logprobs": ("3", 3),
    "max_output_tokens": ("3", 3),
    "max_queued_requests": ("3", 3),
    "max_body_size": ("3", 3),
    "max_header_size": ("3", 3),
    "body_timeout": ("1.5", 1.5),
    "write_timeout": ("1.5", 1.5),
    "ping_interval": ("1.5", 1.5),
    "drain_timeout": ("1.5", 1.5),
    "log_level": ("error", "error"),
    "access_log": ("no", False),
}


def parse(*words: str, given: dict[str, str] | None = None) -> Namespace:
    parser = Parser(prog="serried serve")
    serve.add_arguments(parser)
    args, unknown = parser.parse_known_intermixed_args(words)
    assert not unknown
    fill(args.parser, args, given or {})
    return args


def test_every_field_of_the_config_is_an_option() -> None:
    assert {each.name for each in fields(ServerConfig)} == set(VALUES)
    words = ["m"]
    for name, (text, value) in VALUES.items():
        option = "--" + name.replace("_", "-")
        words += [option, text] if not isinstance(value, bool) else [option] if value else [f"--no-{option[2:]}"]
    assert serve.server_config(parse(*words)) == ServerConfig(**{name: value for name, (_, value) in VALUES.items()})


def test_nothing_given_is_the_defaults() -> None:
    assert serve.server_config(parse("m")) == ServerConfig()


def test_the_same_from_the_environment_and_from_a_file(tmp_path: Path) -> None:
    wanted = ServerConfig(**{name: value for name, (_, value) in VALUES.items()})
    given = {name: "true" if value is True else text for name, (text, value) in VALUES.items()}
    assert serve.server_config(parse("m", given=given)) == wanted
    file = tmp_path / "c.yaml"
    # JSON is YAML too.
    file.write_text(
        json.dumps({name.replace("_", "-"): list(v) if isinstance(v, tuple) else v for name, (_, v) in VALUES.items()})
    )
    assert serve.server_config(parse("m", "--config", str(file))) == wanted
    assert serve.server_config(parse("m", given={"config": str(file)})) == wanted


def test_the_order_of_the_layers(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\nhost: a\nmax-n: 5\nmodel: from-file\ntp-weights: [2, 1]\naccess-log: false\n")
    args = parse("--port", "3", "--config", str(file), given={"port": "2", "host": "b"})
    assert (args.port, args.host, args.max_n, args.model, args.tp_weights) == (3, "b", 5, "from-file", (2, 1))
    assert args.access_log is False
    assert parse("given", "--config", str(file)).model == "given"
    assert parse("--access-log", "--config", str(file)).access_log is True


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("prot: 5", "prot: no such option; did you mean port"),
        ("config: x", "config: no such option"),
        ("port: many", "port: --port many: expected a whole number"),
        ("port: [1, x]", "port: .*expected a text or a number"),
        ("port: true", "port: True: expected a text or a number"),
        ("access-log: maybe", "access-log: 'maybe': expected true or false"),
        ("- a", "expected a mapping"),
        ("1: 2", "expected a mapping"),
        ("a: [", "not YAML"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
        ("\udcff", "cannot be read"),
    ],
)
def test_a_bad_file(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=says) as caught:
        parse("m", "--config", str(file))
    assert "c.yaml" in str(caught.value)


def test_an_empty_file_and_none(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# nothing\n")
    assert parse("m", "--config", str(tmp_path / "c.yaml")).port is None
    with pytest.raises(InputError, match=r"nothing\.yaml: cannot be read"):
        parse("m", "--config", str(tmp_path / "nothing.yaml"))


def test_a_bad_variable() -> None:
    with pytest.raises(InputError, match="SERRIED_API_KEYS: no such option; did you mean API_KEY"):
        parse("m", given={"api_keys": "x"})  # taken silently, it would leave the server open
    with pytest.raises(InputError, match="SERRIED_PORT: --port x"):
        parse("m", given={"port": "x"})


def test_the_environment_is_read_by_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERRIED_MAX_MODEL_LEN", "512")
    monkeypatch.setenv("SERRIED_ISA", "avx2")
    found = environment.environment_options()
    assert found["max_model_len"] == "512"
    assert "isa" not in found


def test_no_model() -> None:
    with pytest.raises(InputError, match="no model: give MODEL"):
        serve.run(parse())


def test_a_directory_says_how_to_sample(tmp_path: Path) -> None:
    source: Any = Namespace(directory=tmp_path)
    assert serve.sampling_defaults(source) == {}
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1], "max_new_tokens": 9}')
    assert serve.sampling_defaults(source) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 9}
    path.write_text('{"temperature": 0.6, "do_sample": false}')
    assert serve.sampling_defaults(source) == {}
    path.write_text("{")
    with pytest.raises(InputError, match=r"generation_config\.json: not readable"):
        serve.sampling_defaults(source)


def complete(script: str, *words: str) -> set[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    code = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _serried; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_completion(capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    assert completion.run(Namespace(shell="bash")) == 0
    script = capsys.readouterr().out
    assert complete(script, "serried", "") == {*COMMANDS, "--help", "--version"}
    assert complete(script, "serried", "se") == {"serve"}
    assert complete(script, "serried", "serve", "--max-n") == {"--max-n", "--max-num-batched-tokens", "--max-num-seqs"}
    assert complete(script, "serried", "layout", "--tensor") == {"--tensor-parallel-size"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.run(Namespace(shell=shell)) == 0
    script = capsys.readouterr().out
    assert "serve" in script and "max-num-seqs" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)
