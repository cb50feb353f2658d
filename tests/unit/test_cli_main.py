"""The command line: what it imports, what it says of an error and where, and its exit codes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from serried import __version__
from serried.cli import main as cli
from serried.errors import CheckpointError, InputError, RankFailed, SerriedError

ROOT = Path(__file__).parents[2]
Run = Callable[..., int]


def serried(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serried", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def main_rank(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Decides whether this process is the main rank: `main_rank.value`."""
    setting = SimpleNamespace(value=True)
    monkeypatch.setitem(sys.modules, "serried.config", SimpleNamespace(is_main_rank=lambda: setting.value))
    return setting


@pytest.fixture
def run_fake(monkeypatch: pytest.MonkeyPatch, main_rank: SimpleNamespace) -> Run:
    """Runs `serried fake`, a command of one option that does what it is told."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)

    def run_main(act: Callable[[argparse.Namespace], int], *words: str) -> int:
        module = SimpleNamespace(add_arguments=add_arguments, run=act)
        monkeypatch.setitem(sys.modules, "fake_command", module)
        monkeypatch.setitem(cli.COMMANDS, "fake", ("fake_command", "do as told"))
        return cli.main(["fake", *words])

    return run_main


def raises(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def act(args: argparse.Namespace) -> int:
        raise error

    return act


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["layout", "--help"], ["layout", "-tp", "2"]])
def test_what_needs_no_model_imports_nothing_heavy(words: list[str]) -> None:
    code = f"import sys; from serried.cli.main import main; main({words}); print(*sys.modules, sep='\\n')"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    modules = set(result.stdout.split())
    assert "serried.cli.main" in modules
    assert not modules & {"torch", "numpy", "rich", "serried.cli.generate", "serried.cli.verify"}


def test_help_names_every_command() -> None:
    result = serried("--help")
    assert result.returncode == 0
    text = " ".join(result.stdout.split())
    assert all(f"{name} {summary}" in text for name, (_, summary) in cli.COMMANDS.items())


def test_version() -> None:
    result = serried("--version")
    assert result.returncode == 0
    assert result.stdout.startswith(f"serried {__version__} (") and "native kernels" in result.stdout


def test_options_reach_the_command(run_fake: Run) -> None:
    assert run_fake(lambda args: args.tensor_parallel_size, "-tp", "7") == 7


@pytest.mark.parametrize(
    ("words", "start", "end"),
    [
        ("", "serried: ", "COMMAND"),
        ("layuot", "serried: ", "unknown command layuot; did you mean layout?"),
        ("xyzzy", "serried: ", "unknown command xyzzy"),
        ("--jsn layout", "serried layout: ", "unknown argument --jsn; did you mean --json?"),
        ("layout --wrld-size 8", "serried layout: ", "--wrld-size; did you mean --world-size?"),
        ("layout --wrld-size=8", "serried layout: ", "--wrld-size; did you mean --world-size?"),
        ("layout --qqq", "serried layout: ", "unknown argument --qqq"),
        ("layout 8", "serried layout: ", "unknown argument 8"),
        (
            "layout --world-siz 8",
            "serried layout: ",
            "unknown argument --world-siz; did you mean --world-size?",
        ),
        ("layout -t 8", "serried layout: ", "unknown argument -t; did you mean -tp?"),
        ("layout -tp many", "serried layout: ", "--tensor-parallel-size/-tp: invalid int value: 'many'"),
        ("layout -tp", "serried layout: ", "--tensor-parallel-size/-tp: expected one argument"),
        ("layout -tp 3 --world-size 8 --json", "serried layout: ", "legal values are 1, 2, 4, 8"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: str, start: str, end: str, capsys: pytest.CaptureFixture[str], main_rank: SimpleNamespace
) -> None:
    assert cli.main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"{start}error: ")
    assert err.endswith(f"{end}\n")


def test_bad_input_end_to_end() -> None:
    result = serried("layout", "--world-size", "8", "-tp", "3", "--json")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("serried layout: error: --tensor-parallel-size 3: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("a\n  b"), 2),
        (CheckpointError("a b"), 2),
        (SerriedError("a b"), 1),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(
    error: SerriedError, code: int, run_fake: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_fake(raises(error)) == code
    assert capsys.readouterr() == ("", "serried fake: error: a b\n")


def test_a_failed_rank_shows_its_traceback_first(run_fake: Run, capsys: pytest.CaptureFixture[str]) -> None:
    error = RankFailed(1, "ValueError: no", "Traceback (most recent call last):\n  ...\nValueError: no\n")
    assert run_fake(raises(error)) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"{error.traceback}serried fake: error: rank 1: ValueError: no\n"


def test_bad_input_is_reported_by_the_main_rank_alone(
    run_fake: Run, main_rank: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    main_rank.value = False
    assert run_fake(raises(InputError("no"))) == 2
    assert run_fake(raises(InputError("no")), "--typo") == 2
    assert capsys.readouterr() == ("", "")
    assert run_fake(raises(RankFailed(1, "died"))) == 3
    assert "rank 1: died" in capsys.readouterr().err


def test_an_interrupt_is_quiet(run_fake: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_fake(raises(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")


def test_a_defect_keeps_its_traceback(run_fake: Run) -> None:
    with pytest.raises(ZeroDivisionError):
        run_fake(lambda args: 1 // 0)


PATCHED = """
import sys, types
from serried.cli import main as cli
def run(args):
    {body}
sys.modules["fake_command"] = types.SimpleNamespace(add_arguments=lambda parser: None, run=run)
cli.COMMANDS["fake"] = ("fake_command", "do as told")
sys.exit(cli.main(["fake"]))
"""


def start(body: str) -> subprocess.Popen[str]:
    """A process that runs a command with this body."""
    command = [sys.executable, "-c", PATCHED.format(body=body)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_the_exit_code_of_a_defect_is_1() -> None:
    with start("raise ZeroDivisionError('oops')") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert "Traceback" in err
    assert "oops" in err


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_a_reader_that_leaves_is_no_error(size: int) -> None:
    with start(f"input(); print('x' * {size}); return 0") as process:
        if process.stdout is None or process.stdin is None or process.stderr is None:
            pytest.fail("no pipes")
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 141


def test_another_broken_pipe_is_a_defect() -> None:
    with start("raise BrokenPipeError('a rank is gone')") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "a rank is gone" in err


LISTED = [
    (
        "--world-size 16 -tp 4 -pp 1 -dp 4",
        {
            "tp": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
            "pp": [[rank] for rank in range(16)],
            "dp": [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
            "ep": [list(range(16))],
        },
    ),
    (
        "--world-size 8 -tp 2 -pp 4",
        {"tp": [[0, 1], [2, 3], [4, 5], [6, 7]], "pp": [[0, 2, 4, 6], [1, 3, 5, 7]]},
    ),
]


@pytest.mark.parametrize(("options", "groups"), LISTED)
def test_layout_json(options: str, groups: dict[str, list[list[int]]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["layout", *options.split(), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"world_size", "tp", "pp", "dp", "ep", "external_dp", "pcp", "dcp"}
    assert {kind: document[kind] for kind in groups} == groups
    assert document["world_size"] == int(options.split()[1])


@pytest.mark.parametrize(("options", "groups"), LISTED)
def test_layout_lists_every_group(
    options: str, groups: dict[str, list[list[int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["layout", *options.split()]) == 0
    out = capsys.readouterr().out
    assert all(str(group) in out for kind in groups.values() for group in kind if len(group) > 1)


def test_layout_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["layout", "-tp", "4", "-pp", "2", "-dp", "2", "-dcp", "2"]) == 0
    picture = capsys.readouterr().out.split("\n\ntp ")[0]
    assert picture.splitlines() == [
        "16 ranks = dp 2 x pp 2 x tp 4",
        "",
        "              tp 0  tp 1   tp 2  tp 3",
        "dp 0  pp 0  [    0     1 |    2     3 ]",
        "dp 0  pp 1  [    4     5 |    6     7 ]",
        "",
        "dp 1  pp 0  [    8     9 |   10    11 ]",
        "dp 1  pp 1  [   12    13 |   14    15 ]",
    ]
