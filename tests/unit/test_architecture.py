"""The rules that docs/architecture.md states of the source, each with bad files that it must catch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "serried"

# What each folder or top-level file may import of Serried, apart from itself. `__version__` is open to all.
# weights, quant and backends are one level: the loader fills a backend's arrays, a backend takes its specs.
BOTTOM = {"errors", "config", "sampling_params", "machine"}
LOW = BOTTOM | {"parallel", "_native"}
LEVEL = {"weights", "quant", "backends"}
FORWARD = LOW | LEVEL | {"kv"}
MODEL = FORWARD | {"layers", "models"}
ENGINE = MODEL | {"engine", "text", "progress"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "sampling_params": {"errors"},
    "machine": {"errors"},
    "progress": set(),
    "config": {"errors", "sampling_params", "machine"},
    "_native": BOTTOM,
    "parallel": BOTTOM | {"_native"},
    "kv": LOW,
    **{each: FORWARD - {each} for each in LEVEL},
    "layers": FORWARD,
    "models": FORWARD | {"layers"},
    "text": LOW | {"weights"},
    "plan": MODEL,
    "engine": MODEL | {"text", "progress"},
    "server": ENGINE,
    "verify": ENGINE,
    "bench": ENGINE | {"plan"},
    "cli": ENGINE | {"plan", "server", "verify", "bench"},
    "__init__": {"engine", "sampling_params"},
    "__main__": {"cli"},
}
LAZY = {"LLM": "engine", "SamplingParams": "sampling_params", "__version__": ""}  # of serried/__init__.py

PURE = {
    "sampling_params.py",
    "parallel/layout.py",
    "parallel/partition.py",
    "parallel/reduction.py",
    "parallel/select.py",
    "quant/method.py",
    "quant/int8.py",
    "quant/int4.py",
    "quant/registry.py",
    "quant/select.py",
    "kv/pool.py",
    "kv/prefix.py",
    "engine/edits.py",
    "engine/request.py",
    "engine/scheduler.py",
}
WITH_TORCH = {"backends/torch.py", "parallel/torch_comm.py", "parallel/mappings.py", "verify/reference.py"}
UNSAFE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
MAX_LINES = 350

Rule = Callable[[str, str], list[str]]  # (path under serried/, source) -> what is wrong


def nodes(tree: ast.AST, type_checking: bool = True) -> Iterator[ast.AST]:
    """All nodes of a tree; without what stands under `if TYPE_CHECKING`, where so asked."""
    yield tree
    children: list[ast.AST] = list(ast.iter_child_nodes(tree))
    if isinstance(tree, ast.If) and not type_checking and ast.unparse(tree.test).endswith("TYPE_CHECKING"):
        children = list(tree.orelse)
    for child in children:
        yield from nodes(child, type_checking)


def imports(path: str, source: str, type_checking: bool = True) -> Iterator[tuple[int, str]]:
    """(line, full name) of everything that a file imports, at its top or inside a function."""
    package = ["serried", *Path(path).parent.parts]
    for node in nodes(ast.parse(source), type_checking):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "serried" and node.attr in LAZY:
            yield node.lineno, f"serried.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def one_way(path: str, source: str) -> list[str]:
    """A file imports only what its folder may import."""
    own = Path(path).parts[0].removesuffix(".py")
    if own not in ALLOWED:
        return [f"{path}: say in ALLOWED what {own} may import"]
    wrong = []
    for line, name in imports(path, source, type_checking=False):
        top, *rest = name.split(".")
        if top == "serried":
            folder = LAZY.get(rest[0], rest[0]) if rest else ""
            if folder and folder != own and folder not in ALLOWED[own]:
                wrong.append(f"{path}:{line}: {own} must not import {name}")
    return wrong


def pure(path: str, source: str) -> list[str]:
    """A pure file imports the standard library, NumPy, serried.errors and other pure files."""
    if path not in PURE:
        return []
    good = {"serried.errors", *("serried." + each.removesuffix(".py").replace("/", ".") for each in PURE)}
    return [
        f"{path}:{line}: a pure file must not import {name}"
        for line, name in imports(path, source, type_checking=False)
        if name.split(".")[0] not in sys.stdlib_module_names | {"numpy"}
        and name not in good
        and name.rpartition(".")[0] not in good
    ]


def torch_has_its_places(path: str, source: str) -> list[str]:
    """PyTorch is optional: few files import it."""
    if path in WITH_TORCH:
        return []
    found = imports(path, source)
    return [f"{path}:{line}: must not import {name}" for line, name in found if name.split(".")[0] == "torch"]


def environment_is_read_by_config(path: str, source: str) -> list[str]:
    """Nothing but config.py reads or changes the environment."""
    if path == "config.py":
        return []
    names = {f"os.{name}" for name in ENVIRONMENT}
    reads = [
        (node.lineno, ast.unparse(node))
        for node in nodes(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT
    ]
    reads += [(line, name) for line, name in imports(path, source) if name in names]
    return [f"{path}:{line}: {name} belongs into config.py" for line, name in reads]


def nothing_runs_what_it_reads(path: str, source: str) -> list[str]:
    """No pickle, no eval, nothing that runs code found in a file."""
    wrong = [(line, name) for line, name in imports(path, source) if name.split(".")[0] in UNSAFE]
    for node in nodes(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in {"eval", "exec", "torch.load", "builtins.eval", "builtins.exec"}:
                wrong.append((node.lineno, name))
            wrong += [(node.lineno, "allow_pickle") for word in node.keywords if word.arg == "allow_pickle"]
    wrong += [(line, name) for line, name in imports(path, source) if name == "torch.load"]
    return [f"{path}:{line}: {name} may run what it reads" for line, name in wrong]


def no_assert(path: str, source: str) -> list[str]:
    """An assert vanishes under -O and tells a user nothing."""
    found = [node for node in nodes(ast.parse(source)) if isinstance(node, ast.Assert)]
    return [f"{path}:{node.lineno}: assert" for node in found]


def short(path: str, source: str) -> list[str]:
    """A file that grows is asking to be two."""
    lines = len(source.splitlines())
    return [f"{path}: {lines} lines, more than {MAX_LINES}"] if lines > MAX_LINES else []


RULES: list[Rule] = [
    one_way,
    pure,
    torch_has_its_places,
    environment_is_read_by_config,
    nothing_runs_what_it_reads,
    no_assert,
    short,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule: Rule) -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 10
    broken = [line for file in files for line in rule(file.relative_to(SOURCE).as_posix(), file.read_text("utf-8"))]
    assert not broken, "\n".join(broken)


def cycle(sources: Mapping[str, str]) -> list[str]:
    """Files that import each other in a ring."""
    modules = {
        "serried." + path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources
    }
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        names = [name for _, name in imports(path, source, type_checking=False)]
        found = {modules.get(name) or modules.get(name.rpartition(".")[0]) for name in names}
        graph[path] = {each for each in found if each and each != path}  # a package may import its own extension
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other() -> None:
    files = {file.relative_to(SOURCE).as_posix(): file.read_text("utf-8") for file in SOURCE.rglob("*.py")}
    del files["__init__.py"]  # everything is below it, and it imports lazily
    assert not cycle(files)


def test_a_ring_of_files_is_caught() -> None:
    ring = {
        "weights/load.py": "from serried.backends.base import Backend",
        "backends/base.py": "from serried.kv import cache",
        "kv/cache.py": "def f():\n    import serried.weights.load",
    }
    assert set(cycle(ring)) == set(ring)
    assert not cycle({**ring, "kv/cache.py": "if TYPE_CHECKING:\n    import serried.weights.load"})


def test_the_table_of_imports_runs_one_way() -> None:
    """Taking a level as one, no folder may import what may import it."""
    level = dict.fromkeys(LEVEL, "level")
    graph: dict[str, set[str]] = {}
    for folder, allowed in ALLOWED.items():
        own = level.get(folder, folder)
        graph.setdefault(own, set()).update({level.get(each, each) for each in allowed} - {own})
    assert list(TopologicalSorter(graph).static_order())


BAD: list[tuple[Rule, str, str]] = [
    (one_way, "layers/linear.py", "from serried.models.decoder import Decoder"),
    (one_way, "layers/linear.py", "import serried.engine.core"),
    (one_way, "layers/linear.py", "from serried import models"),
    (one_way, "layers/linear.py", "from serried import LLM"),
    (one_way, "layers/linear.py", "import serried\nserried.LLM('demo')"),
    (one_way, "layers/linear.py", "from ..engine import core"),
    (one_way, "models/families/qwen3.py", "from ...engine.core import EngineCore"),
    (one_way, "parallel/partition.py", "def f():\n    from serried.weights.spec import Piece"),
    (one_way, "errors.py", "from serried.config import Config"),
    (one_way, "kv/pool.py", "if flag:\n    import serried.engine.request"),
    (one_way, "kv/pool.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import serried.engine.request"),
    (one_way, "kv/pool.py", "import importlib\nimportlib.import_module('serried.engine.core')"),
    (one_way, "oddments/x.py", ""),
    (pure, "parallel/partition.py", "import torch"),
    (pure, "parallel/partition.py", "from serried.parallel.comm import LocalComm"),
    (pure, "parallel/partition.py", "from serried.parallel import comm"),
    (pure, "engine/scheduler.py", "from serried.config import EngineConfig"),
    (pure, "kv/pool.py", "import ml_dtypes"),
    (torch_has_its_places, "models/decoder.py", "import torch"),
    (torch_has_its_places, "models/decoder.py", "def f():\n    from torch.nn import functional"),
    (torch_has_its_places, "models/decoder.py", "import_module('torch.distributed')"),
    (environment_is_read_by_config, "engine/core.py", "import os\nx = os.environ['A']"),
    (environment_is_read_by_config, "engine/core.py", "import os as o\nx = o.getenv('A')"),
    (environment_is_read_by_config, "engine/core.py", "from os import environ"),
    (nothing_runs_what_it_reads, "weights/load.py", "import pickle"),
    (nothing_runs_what_it_reads, "weights/load.py", "from marshal import loads"),
    (nothing_runs_what_it_reads, "weights/load.py", "x = eval('1')"),
    (nothing_runs_what_it_reads, "backends/torch.py", "import torch\ntorch.load('a.pt')"),
    (nothing_runs_what_it_reads, "backends/torch.py", "from torch import load"),
    (nothing_runs_what_it_reads, "weights/load.py", "np.load('a.npy', allow_pickle=True)"),
    (no_assert, "engine/core.py", "def f(x):\n    assert x"),
    (short, "engine/core.py", "\n" * (MAX_LINES + 1)),
]


@pytest.mark.parametrize(("rule", "path", "source"), BAD)
def test_a_bad_file_is_caught(rule: Rule, path: str, source: str) -> None:
    assert len(rule(path, source)) == 1


GOOD: list[tuple[str, str]] = [
    ("layers/linear.py", "from serried.parallel.partition import Partition\nfrom serried import __version__"),
    ("parallel/launch.py", "import serried\nserried.__file__"),
    ("parallel/launch.py", "import serried\nserried.__version__"),
    ("layers/linear.py", "if TYPE_CHECKING:\n    from serried.engine.core import EngineCore"),
    ("layers/linear.py", "from .norm import RMSNorm\nfrom ..weights.spec import ShardSpec"),
    ("cli/main.py", "from serried.engine.llm import LLM\nimport os\nos.cpu_count()"),
    ("parallel/partition.py", "import math\nimport numpy as np\nfrom serried.parallel.reduction import Span"),
    ("engine/scheduler.py", "from serried.kv.pool import BlockPool\nfrom serried.errors import InputError"),
    ("backends/torch.py", "import torch\nmodel.eval()"),
    ("config.py", "import os\nrank = os.environ.get('RANK')"),
]


@pytest.mark.parametrize(("path", "source"), GOOD)
def test_a_good_file_passes(path: str, source: str) -> None:
    assert not [line for rule in RULES for line in rule(path, source)]
