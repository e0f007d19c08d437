"""Who may import whom. The order has no cycles, so neither have the packages."""

from __future__ import annotations

import ast
import functools
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "enginery"
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))

# Each package imports only from ranks below its own, and from itself. Equal ranks do not see each other.
RANKS = [
    {"errors", "child_process"},
    {"contracts"},
    {"plugin"},
    {"config"},
    {"checkpoint"},
    {"nn", "text"},
    {"kv"},
    {"attention"},
    {"schedule"},
    {"speculate"},
    {"worker"},
    {"engine"},
    {"llm", "serve"},
    {"testing"},
    {"bench"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}
TOP = {"", "__main__"}  # the package itself is lazy, and above everything
PUBLIC_MODULES = ("enginery.attention.wrapper.",)  # of rooms that plugins do not enter otherwise
# Below the scheduler there are seats, numbers and tensors: whose they are is known above. Log-probabilities are results, and which
# drafts are accepted is a function of tensors.
WORKER_SIDE = {"kv", "attention", "nn", "worker"}
REQUEST_SIDE = (
    "enginery.schedule",
    "enginery.speculate",
    "enginery.text",
    "enginery.contracts.grammars",
    "enginery.contracts.request",
)
RESULTS = {
    "enginery.contracts.request.TokenLogprob",
    "enginery.speculate.acceptance.accept",
    "enginery.speculate.combs.comb_parents",
    "enginery.speculate.combs.num_verified",
}
API_IMPORTS = {"errors", "contracts", "plugin", "checkpoint"}


@dataclass(frozen=True)
class Import:
    """One imported name. where: "module", "function" or "typing" (under TYPE_CHECKING)."""

    line: int
    name: str
    where: str


STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)  # no expression imports anything


@functools.cache
def imports(source: str, module: str) -> list[Import]:
    """Every import in `source`, the file of `module`, whose name ends in `.__init__` for a package."""

    def visit(node: ast.AST, where: str) -> Iterator[Import]:
        for child in (each for each in ast.iter_child_nodes(node) if isinstance(each, STATEMENTS)):
            inner = where
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                inner = "typing"
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and where == "module":
                inner = "function"
            if isinstance(child, ast.Import):
                yield from (Import(child.lineno, alias.name, where) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = module.split(".")[: -child.level] if child.level else []
                base = ".".join([*above, *filter(None, [child.module])])
                yield from (Import(child.lineno, f"{base}.{alias.name}", where) for alias in child.names)
            yield from visit(child, inner)

    return list(visit(ast.parse(source), "module"))


def module_name(path: Path, above: Path) -> str:
    """The dotted name of a file, with `.__init__` for a package's."""
    return ".".join(path.relative_to(above).with_suffix("").parts)


def core_package(name: str) -> str:
    """`enginery.llm.llm.LLM` -> `llm`; the empty string for what the top package itself offers."""
    parts = name.split(".")
    known = RANK.keys() | {"api", "__main__"}
    return parts[1] if len(parts) > 1 and (parts[1] in known or (CORE / parts[1]).is_dir()) else ""


def order_offences(source: str, module: str) -> list[str]:
    """Imports of a core module that point upward, at a plugin's door, or past the order."""
    own, offences = core_package(module), []
    if own not in RANK.keys() | TOP | {"api"}:
        return [f"package {own} has no rank"]
    for found in imports(source, module):
        if found.name.split(".")[0] != "enginery":
            continue
        other = core_package(found.name)
        if own == "api":
            fine = other in API_IMPORTS | {"api"}
        elif other == "api":
            fine = own in TOP | {"testing"}
        elif other == "":
            fine = own in TOP | {"testing"} or found.name == "enginery.__version__"
        else:
            fine = own in TOP or other == own or RANK[other] < RANK[own]
        if not fine:
            offences.append(f"line {found.line}: {own or 'the top package'} imports {found.name}")
    return offences


def request_offences(source: str, module: str) -> list[str]:
    """Imports of requests, grammars, tokenizers or the scheduler, for type checking too."""
    return [
        f"line {found.line}: imports {found.name}"
        for found in imports(source, module)
        if f"{found.name}.".startswith(tuple(f"{name}." for name in REQUEST_SIDE)) and found.name not in RESULTS
    ]


def torch_offences(source: str, module: str) -> list[str]:
    """Imports of torch that are not under TYPE_CHECKING."""
    return [
        f"line {found.line}: imports {found.name} outside TYPE_CHECKING"
        for found in imports(source, module)
        if found.name.split(".")[0] == "torch" and found.where != "typing"
    ]


def named_plugin_offences(source: str, names: set[str], import_names: set[str]) -> list[str]:
    """Imports of a plugin, and strings that equal a plugin's name or have its package's within. Docstrings may name one."""
    nodes = list(ast.walk(ast.parse(source))) if names else []
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    imported = [found for found in imports(source, "any") if found.name.split(".")[0] in import_names]
    offences = [f"line {found.line}: imports {found.name}" for found in imported]
    for node in nodes:
        if not isinstance(node, ast.Constant) or id(node) in docstrings or not isinstance(node.value, str):
            continue
        if node.value in names or any(name in node.value for name in import_names):
            offences.append(f"line {node.lineno}: names the plugin {node.value!r}")
    return offences


@dataclass(frozen=True)
class Plugin:
    """What a plugin's pyproject.toml says."""

    distribution: str
    import_names: frozenset[str]
    entry_points: frozenset[str]
    requires: frozenset[str]


def read_plugin(text: str) -> Plugin:
    """Parse a pyproject.toml."""
    project = tomllib.loads(text)["project"]
    points = project.get("entry-points", {}).get("enginery", {})
    return Plugin(
        distribution=project["name"],
        import_names=frozenset(target.split(":")[0].split(".")[0] for target in points.values()),
        entry_points=frozenset(points),
        requires=frozenset(Requirement(text).name for text in project["dependencies"]),
    )


def plugin_offences(source: str, module: str, *, own: Plugin, others: list[Plugin], in_tests: bool) -> list[str]:
    """Imports of a plugin's module that its kind of module may not have."""
    parts = module.split(".")
    light = not in_tests and len(parts) == 2 and parts[1] in ("__init__", "spec")
    allowed = {"api"} if light else {"api", "nn", "kv", "testing", ""} if in_tests else {"api", "nn", "kv"}
    offences = []
    for found in imports(source, module):
        top, fine = found.name.split(".")[0], True
        if top == "enginery":
            fine = (
                core_package(found.name) in allowed
                or (not light and found.name.startswith(PUBLIC_MODULES))
                or (found.where == "typing" and core_package(found.name) in ("nn", "kv"))
            )
        elif owner := next((plugin for plugin in others if top in plugin.import_names), None):
            fine = owner.distribution in own.requires and not (light and found.where == "module")
        elif light and found.where != "typing":
            fine = top in sys.stdlib_module_names or top in own.import_names
        if not fine:
            offences.append(f"line {found.line}: imports {found.name}")
    if light:
        offences += [
            f"line {found.line}: imports its own heavy module {found.name} when it is imported"
            for found in imports(source, module)
            if found.where == "module" and found.name.split(".")[0] in own.import_names and "spec" not in found.name.split(".")[1:2]
        ]
    return offences


ALL = [read_plugin((folder / "pyproject.toml").read_text()) for folder in PLUGINS]


def test_core_modules_import_only_from_below() -> None:
    offences = []
    for path in sorted(CORE.rglob("*.py")):
        module = module_name(path, CORE.parent)
        offences += [f"{module}: {text}" for text in order_offences(path.read_text(), module)]
    assert not offences, "\n".join(offences)


def test_a_worker_and_what_is_below_know_no_request_grammar_or_tokenizer() -> None:
    offences = []
    for path in sorted(path for package in WORKER_SIDE for path in (CORE / package).rglob("*.py")):
        module = module_name(path, CORE.parent)
        offences += [f"{module}: {text}" for text in request_offences(path.read_text(), module)]
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize(
    "source",
    [
        "from enginery.schedule.request import Request\n",
        "from enginery import schedule\n",
        "def f():\n    import enginery.text.tokenizer\n",
        "if TYPE_CHECKING:\n    from enginery.contracts.grammars import GrammarState\n",
        "from enginery.contracts.request import SamplingParams\n",
    ],
)
def test_a_request_below_the_worker_is_reported(source: str) -> None:
    assert len(request_offences(source, "enginery.worker.runner")) == 1
    assert request_offences("from enginery.contracts.request import TokenLogprob\n", "enginery.worker.runner") == []


def test_contracts_import_torch_only_for_type_checking() -> None:
    offences = []
    for path in sorted((CORE / "contracts").rglob("*.py")):
        module = module_name(path, CORE.parent)
        offences += [f"{module}: {text}" for text in torch_offences(path.read_text(), module)]
    assert not offences, "\n".join(offences)


def test_the_core_neither_imports_nor_names_a_plugin() -> None:
    import_names = {name for plugin in ALL for name in plugin.import_names}
    forbidden = import_names | {name for plugin in ALL for name in (*plugin.entry_points, plugin.distribution)}
    offences = []
    for path in sorted(CORE.rglob("*.py")):
        found = named_plugin_offences(path.read_text(), forbidden, import_names)
        offences += [f"{path.relative_to(ROOT)}: {text}" for text in found]
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize(("folder", "own"), list(zip(PLUGINS, ALL, strict=True)), ids=[folder.name for folder in PLUGINS])
def test_a_plugin_imports_what_plugins_may(folder: Path, own: Plugin) -> None:
    others = [plugin for plugin in ALL if plugin != own]
    offences = []
    for part, in_tests in (("src", False), ("tests", True)):
        for path in sorted((folder / part).rglob("*.py")):
            module = module_name(path, folder / part)
            found = plugin_offences(path.read_text(), module, own=own, others=others, in_tests=in_tests)
            offences += [f"{path.relative_to(ROOT)}: {text}" for text in found]
    assert not offences, "\n".join(offences)


def fixture_offences(source: str) -> list[str]:
    """Functions that take the suite's `registry`, of all plugins that are installed, in a file that has none of its own."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    if "registry" in {node.name for node in functions}:
        return []
    asking = [node.name for node in functions if "registry" in {name.arg for name in node.args.args} and is_collected(node)]
    return [f"{name} takes the registry of all plugins" for name in asking]


def is_collected(node: ast.FunctionDef) -> bool:
    """A test, or a fixture."""
    return node.name.startswith("test_") or any("fixture" in ast.unparse(each) for each in node.decorator_list)


def test_tests_of_the_core_alone_need_no_plugin() -> None:
    import_names = {name for plugin in ALL for name in plugin.import_names}
    offences = []
    for path in sorted((ROOT / "tests" / "core").rglob("*.py")):
        found = named_plugin_offences(path.read_text(), set(), import_names) + fixture_offences(path.read_text())
        offences += [f"{path.relative_to(ROOT)}: {text}" for text in found]
    assert not offences, "\n".join(offences)


def test_a_test_of_the_core_that_takes_all_plugins_is_reported() -> None:
    asking = "def test_it(registry):\n    pass\n"
    assert fixture_offences(asking) == ["test_it takes the registry of all plugins"]
    assert fixture_offences(asking + "def registry():\n    pass\n") == []
    assert fixture_offences("def helper(registry):\n    pass\n") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("enginery.kv.pages", "from enginery.engine.engine import Engine\n"),
        ("enginery.kv.pages", "def f():\n    import enginery.schedule\n"),
        ("enginery.kv.pages", "if TYPE_CHECKING:\n    from enginery.serve import app\n"),
        ("enginery.kv.pages", "from enginery import engine\n"),
        ("enginery.kv.pages", "from ..engine import engine\n"),
        ("enginery.nn.linear", "from enginery.text import tokenizer\n"),
        ("enginery.engine.engine", "from enginery.api import hookimpl\n"),
        ("enginery.engine.engine", "from enginery import LLM\n"),
        ("enginery.api", "from enginery.nn.rotary import Rotary\n"),
    ],
)
def test_an_upward_import_is_reported(module: str, source: str) -> None:
    assert len(order_offences(source, module)) == 1


def test_downward_imports_are_fine() -> None:
    assert order_offences("from enginery.kv.pool import Pool\nfrom . import batch\nimport torch\n", "enginery.engine.engine") == []
    assert order_offences("from enginery import __version__\n", "enginery.cli.main") == []
    assert order_offences("from .llm.llm import LLM\n", "enginery.__init__") == []


def test_torch_in_a_contract_is_reported() -> None:
    assert torch_offences("import torch\n", "enginery.contracts.x") != []
    assert torch_offences("def f():\n    from torch import nn\n", "enginery.contracts.x") != []
    assert torch_offences("if TYPE_CHECKING:\n    import torch\n", "enginery.contracts.x") == []


def test_a_plugins_name_in_the_core_is_reported() -> None:
    names = {"echo", "enginery-echo"}
    assert named_plugin_offences("if name == 'echo':\n    pass\n", names, {"enginery_echo"}) != []
    assert named_plugin_offences("import enginery_echo.model\n", names, {"enginery_echo"}) != []
    assert named_plugin_offences("x = f'run python -m enginery_echo.model {y}'\n", names, {"enginery_echo"}) != []
    assert named_plugin_offences('"""echo"""\nx = "an echo"\ntyper.echo(1)\n', names, {"enginery_echo"}) == []


A = Plugin("enginery-a", frozenset({"enginery_a"}), frozenset({"a"}), frozenset({"enginery"}))
B = Plugin("enginery-b", frozenset({"enginery_b"}), frozenset({"b"}), frozenset({"enginery", "enginery-a"}))


def test_a_plugins_project_file_is_read() -> None:
    text = """[project]
name = "enginery-b"
dependencies = ["enginery>=0.1,<0.2", "enginery-a"]
entry-points.enginery = {b = "enginery_b"}
"""
    assert read_plugin(text) == B


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("enginery_a.__init__", "import torch\n"),
        ("enginery_a.__init__", "from enginery.nn.rotary import Rotary\n"),
        ("enginery_a.__init__", "from enginery_a.model import build\n"),
        ("enginery_a.__init__", "def f():\n    from enginery.nn.rotary import Rotary\n"),
        ("enginery_a.spec", "import numpy\n"),
        ("enginery_a.spec", "from enginery.contracts.attention import Reason\n"),
        ("enginery_a.spec", "def refuse(needs):\n    import torch\n"),
        ("enginery_a.model", "from enginery.engine.engine import Engine\n"),
        ("enginery_a.model", "from enginery.testing import fakes\n"),
        ("enginery_a.model", "from enginery_b.model import Block\n"),
        ("test_a", "from enginery.engine.engine import Engine\n"),
    ],
)
def test_what_a_plugin_may_not_import_is_reported(module: str, source: str) -> None:
    assert len(plugin_offences(source, module, own=A, others=[B], in_tests=module == "test_a")) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("enginery_b.__init__", "import json\nfrom enginery.api import hookimpl\nfrom enginery_b.spec import B\n"),
        ("enginery_b.__init__", "def f():\n    from enginery_b.model import Model\n"),
        ("enginery_b.model", "import torch\nfrom enginery.api import Model\nfrom enginery.nn.rotary import Rotary\n"),
        ("enginery_b.model", "from enginery_a.model import Block\n"),
        (
            "test_b",
            "import pytest\nfrom enginery import LLM\nfrom enginery.testing import fakes\nfrom enginery_b.model import Model\n",
        ),
    ],
)
def test_what_a_plugin_may_import_is_not_reported(module: str, source: str) -> None:
    assert plugin_offences(source, module, own=B, others=[A], in_tests=module == "test_b") == []
