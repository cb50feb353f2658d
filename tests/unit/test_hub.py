"""Models on the hub: what is downloaded, what the cache answers, and what an error says. The hub is a local one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_hub import FakeHub
from tiny_models import Models

from serried.engine.executor import _check_commits
from serried.errors import InputError
from serried.models.hub import HubModel

ROOT = str(Path(__file__).parents[2])
ASK = """
import json, sys
from serried.errors import InputError
from serried.models.registry import open_model
for name, revision, weights in json.loads(sys.argv[1]):
    try:
        source = open_model(name, revision, weights=weights)
        answer = {"name": source.name, "location": source.location, "commit": source.commit}
    except InputError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
"""


def ask(hub: FakeHub, *questions: Any, **environment: str) -> list[dict[str, str]]:
    """What open_model says of each (name, revision, weights) in a process whose hub is this one."""
    full = [
        [*question, None, True][:3] if isinstance(question, tuple) else [question, None, True] for question in questions
    ]
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(full)],
        env=hub.environment(PYTHONPATH=ROOT, **environment),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "%|" not in done.stderr  # stderr is no terminal: no progress bars
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def hub(tiny: Models, tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub(tmp_path / "home") as made:
        made.repos["acme/tiny"] = tiny.directory("split-text")
        yield made


def test_names() -> None:
    assert HubModel.parse("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", None)
    assert HubModel.parse("a/b_c.d:Q4_0/m-00001-of-00002.gguf") == ("a/b_c.d", "Q4_0/m-00001-of-00002.gguf")
    others = [
        "demo",
        "a/b/c",
        "/a/b",
        "./b",
        "../b",
        "a/",
        "a/b:c",
        "a/b:../c.gguf",
        "a/b:x/../../c.gguf",
        "a/b:/c.gguf",
    ]
    assert not [name for name in others if HubModel.parse(name)]


def test_a_snapshot_is_downloaded_once(hub: FakeHub, tmp_path: Path) -> None:
    """The files of a model alone, each with one request; then the cache answers, without a connection too."""
    model = shutil.copytree(hub.repos["acme/tiny"], tmp_path / "model")
    for extra in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "original/model.safetensors"):
        (model / extra).parent.mkdir(exist_ok=True)
        (model / extra).write_bytes(b"not wanted")
    hub.repos["acme/tiny"] = model
    (found,) = ask(hub, "acme/tiny")
    commit = hub.commit("acme/tiny")
    assert (found["name"], found["commit"]) == ("acme/tiny", commit)
    names = {path.name for path in Path(found["location"]).rglob("*")}
    assert names == {path.name for path in model.glob("*.json")} | {"model.safetensors"}
    assert set(hub.requests.values()) == {1}
    hub.requests.clear()
    assert ask(hub, "acme/tiny", ("acme/tiny", "main"), ("acme/tiny", commit)) == [found] * 3
    assert set(hub.requests) == {"GET api/models/acme/tiny/revision/main"}
    hub.requests.clear()
    assert ask(hub, "acme/tiny", ("acme/tiny", commit), HF_HUB_OFFLINE="1") == [found] * 2
    assert not hub.requests
    hub.stop()
    assert ask(hub, "acme/tiny") == [found]


def test_random_weights_need_no_download(hub: FakeHub) -> None:
    (found,) = ask(hub, ("acme/tiny", None, False))
    assert not list(Path(found["location"]).glob("*.safetensors"))
    (missed,) = ask(hub, "acme/tiny", HF_HUB_OFFLINE="1")
    assert "acme/tiny: no such directory here, and not (or not all of it) in the cache" in missed["error"]
    assert ask(hub, "acme/tiny") == [found]
    assert list(Path(found["location"]).glob("*.safetensors"))


def test_gguf_files_by_name(hub: FakeHub, tiny: Models, tmp_path: Path) -> None:
    """One file, or all files of a split model; the others are left where they are."""
    first = tiny.split_gguf("gguf-llama", "Q8_0")
    repo = tmp_path / "gguf"
    (repo / "Q8_0").mkdir(parents=True)
    for part in first.parent.glob(first.name.replace("00001", "*")):
        shutil.copy(part, repo / "Q8_0")
    shutil.copy(tiny.gguf("gguf-qwen3"), repo / "small.gguf")
    hub.repos["acme/gguf"] = repo
    names = ["acme/gguf:small.gguf", f"acme/gguf:Q8_0/{first.name}"]
    one, split = ask(hub, *names)
    assert one["location"].endswith(f"snapshots/{hub.commit('acme/gguf')}/small.gguf")
    assert len(list(Path(split["location"]).parent.iterdir())) == 3
    assert ask(hub, *names, HF_HUB_OFFLINE="1") == [one, split]
    absent, whole = ask(hub, "acme/gguf:other.gguf", "acme/gguf")
    listed = f"but Q8_0/{first.name}, "
    assert absent["error"].startswith(f"acme/gguf:other.gguf: no such file in it, {listed}")
    assert whole["error"].startswith(f"acme/gguf: has no config.json, {listed}")
    assert "small.gguf; for a GGUF give acme/gguf:FILE.gguf" in whole["error"]


def test_what_an_error_says(hub: FakeHub, tiny: Models, tmp_path: Path) -> None:
    hub.repos["acme/gated"] = hub.repos["acme/tiny"]
    hub.gated.add("acme/gated")
    pickles = tiny.copy("split-text", tmp_path)
    (pickles / "model.safetensors").rename(pickles / "pytorch_model.bin")
    hub.repos["acme/pickles"] = pickles
    errors = [
        answer["error"]
        for answer in ask(
            hub,
            "acme/absent",
            "acme/gated",
            "acme/pickles",
            ("acme/tiny", "v9"),
            ("demo", "v9"),
            (ROOT, "v9"),
            "a/b--c",
        )
    ]
    absent, gated, no_weights, revision, demo, directory, malformed = errors
    assert absent.startswith("acme/absent: no such directory here, and no such model on the hub (or a private one")
    assert gated.startswith("acme/gated: its owner gives access on request") and "HF_TOKEN" in gated
    assert no_weights.startswith("acme/pickles: has no weights in safetensors, but pytorch_model.bin; pickles")
    assert revision == "--revision v9: acme/tiny has no such branch, tag or commit"
    assert demo.startswith("--revision v9: demo is not a model on the hub")
    assert directory.startswith(f"--revision v9: {ROOT} is not a model on the hub")
    assert malformed.startswith("a/b--c: cannot be downloaded: HFValidationError")
    (offline,) = ask(hub, "acme/tiny", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE forbids to download it" in offline["error"]
    hub.stop()
    (unreachable,) = ask(hub, "acme/tiny")
    assert "acme/tiny: no such directory here" in unreachable["error"]
    assert "the hub cannot be reached (" in unreachable["error"]
    assert str(hub.home) in unreachable["error"]


def test_the_ranks_are_given_what_the_first_one_found(hub: FakeHub) -> None:
    """One download for all of them, by the command line; and a mistake is one line."""
    command = [sys.executable, "-m", "serried", "generate", "acme/tiny", "--prompt-ids", "5,6,7", "--max-tokens", "4"]
    command += ["--json", "--backend", "torch", "--dtype", "float32", "-tp", "2"]
    env = hub.environment(PYTHONPATH=ROOT)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)["outputs"][0]["token_ids"]) == 4
    assert set(hub.requests.values()) == {1}
    done = subprocess.run([*command, "--revision", "v9"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "serried generate: error: --revision v9: acme/tiny has no such branch, tag or commit\n"


@pytest.mark.parametrize("commits", [("a", "a"), ("", ""), ("a", "b")])
def test_ranks_of_several_machines_must_have_one_commit(commits: tuple[str, str]) -> None:
    """Under torchrun each machine asks its own cache, which may be older than another's."""
    gathered: list[Any] = []

    def all_gather(own: Any, parts: list[int]) -> Any:
        gathered.append(own)
        return np.concatenate(gathered)

    group: Any = SimpleNamespace(size=2, all_gather=all_gather, close=lambda: None)
    sources: list[Any] = [SimpleNamespace(name="acme/tiny", commit=commit) for commit in commits]
    _check_commits(sources[0], group)
    if commits[0] == commits[1]:
        _check_commits(sources[1], group)
        return
    with pytest.raises(InputError, match=r"acme/tiny: the ranks have different commits of it; give --revision COMMIT"):
        _check_commits(sources[1], group)


def test_the_library_is_imported_only_where_it_is_needed(tiny: Models) -> None:
    code = f"""
import sys
from serried.models.registry import open_model
open_model({str(tiny.directory("split-text"))!r})
sys.exit("huggingface_hub" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ROOT})
