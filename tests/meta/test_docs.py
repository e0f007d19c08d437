"""The pages say what the tree does: sample code runs, names and links resolve, the command line's page is current."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import quick_processes
from meta.test_layering import RANKS
from packaging.requirements import Requirement
from pairwise import EVERYTHING

import enginery.api
from enginery.contracts.versions import CONTRACT_VERSIONS, HookGroup

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
WALK = DOCS / "how-a-request-runs.md"
EXECUTED = [README, DOCS / "quickstart.md"]


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def local_links(text: str) -> list[str]:
    """Targets of links that stay in the tree, without their anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target.split("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]


def reachable(start: Path) -> set[Path]:
    """Every page that can be reached from `start` by links."""
    seen, todo = set(), [start]
    while todo:
        page = todo.pop()
        if page in seen or not page.is_file():
            continue
        seen.add(page)
        if page.suffix == ".md":
            todo += [(page.parent / target).resolve() for target in local_links(page.read_text())]
    return seen


def names_in(source: str) -> set[str]:
    """Dotted names of what a module defines: functions, classes, their members and constants."""

    def visit(body: list[ast.stmt], owner: str) -> set[str]:
        names = set()
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names |= {owner + node.name}
            if isinstance(node, ast.ClassDef):
                names |= visit(node.body, f"{owner}{node.name}.")
            if isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {owner + ast.unparse(target) for target in targets}
        return names

    return visit(ast.parse(source).body, "")


def dangling(text: str, root: Path) -> list[str]:
    """What `text` names between backticks as `path` or `path:Dotted.name` that does not exist below `root`."""
    missing = []
    for path, name in re.findall(r"`((?:core|plugins|docs|tests)/[\w./-]+)(?::([\w.]+))?`", text):
        file = root / path
        if not file.exists() or (name and name not in names_in(file.read_text())):
            missing.append(f"{path}:{name}" if name else path)
    return missing


def section_of(page: str, heading: str) -> str | None:
    """What stands below a heading of the second level, however it is written large or small; None if there is no such heading."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL | re.IGNORECASE)
    return found[1] if found else None


def linked_headings(text: str) -> list[str]:
    """Of the same page."""
    return [anchor.replace("-", " ") for anchor in re.findall(r"\]\(#([\w-]+)\)", text)]


def unknown_commands(text: str, cli_page: str, makefile: str) -> list[str]:
    """Lines of shell samples that use a command, an option or a make target that does not exist."""
    lines = [line for block in blocks(text, "(?:sh|console)") for line in block.splitlines() if re.match("(?:make|engine) ", line)]
    targets = set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    wrong = []
    for words in (shlex.split(line, comments=True) for line in lines):
        if words[0] == "make":
            wrong += [f"make {word}" for word in words[1:] if "=" not in word and word not in targets]
        if words[0] == "engine":
            section = section_of(cli_page, f"engine {words[1]}")
            known = (section or "") + "".join(section_of(cli_page, heading) or "" for heading in linked_headings(section or ""))
            wrong += [] if section else [f"engine {words[1]}"]
            wrong += [f"engine {words[1]} {word}" for word in words[2:] if re.match("--?[a-z]", word) and f"`{word}`" not in known]
    return wrong


# Each in a process of its own where there is time for that.
SAMPLES = [block for path in EXECUTED for block in blocks(path.read_text(), "python")]
TOGETHER = [(sample,) for sample in SAMPLES] if EVERYTHING else [tuple(SAMPLES)]


@pytest.mark.parametrize("samples", TOGETHER, ids=lambda samples: f"{len(samples)} of them")
def test_sample_code_runs(samples: tuple[str, ...], tmp_path: Path) -> None:
    code = "import sys\nfor block in sys.argv[1:]:\n    exec(compile(block, block, 'exec'), {'__name__': '__main__'})"
    how = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 150, "check": False}
    done = quick_processes.run_python("-c", code, *samples, **how)
    assert done.returncode == 0, done.stderr


def test_sample_code_is_found() -> None:
    assert all(blocks(path.read_text(), "python") for path in EXECUTED)


def test_the_way_of_a_request_names_what_exists() -> None:
    text = WALK.read_text()
    assert text.count("`core/enginery/") > 10
    missing = dangling(text, ROOT)
    assert not missing, "\n".join(missing)


def unknown_modules(text: str) -> list[str]:
    """What `text` names between backticks as a module of the core, or a name in one, that does not exist: `enginery.kv.pool`."""
    missing = []
    for name in re.findall(r"`(enginery(?:\.\w+)+)`", text):
        path = ROOT / "core" / name.replace(".", "/")
        module = path.with_suffix(".py") if path.with_suffix(".py").exists() else path.parent.with_suffix(".py")
        fine = path.is_dir() or path.with_suffix(".py").exists()
        if not fine and not (module.exists() and re.search(rf"\b{path.name}\b", module.read_text())):
            missing.append(name)
    return missing


TODAY = [README, ROOT / "CONTRIBUTING.md", *ROOT.glob("plugins/*/README.md"), *DOCS.glob("*.md")]


@pytest.mark.parametrize(
    "page", [page for page in TODAY if page.name != "log.md"], ids=lambda page: f"{page.parent.name}/{page.name}"
)
def test_a_page_names_files_and_modules_that_exist(page: Path) -> None:
    text = re.sub(r"^`[^`]+`$", "", page.read_text(), flags=re.MULTILINE)  # the name of a tutorial's own file
    assert [name for name in dangling(text, ROOT) if not (page.parent / name).exists()] == []
    assert unknown_modules(text) == []


def test_a_module_that_is_gone_is_reported() -> None:
    assert unknown_modules("`enginery.kv` `enginery.kv.pool` `enginery.api.hookimpl` `enginery.memory` `enginery.api.nothing`") == [
        "enginery.memory",
        "enginery.api.nothing",
    ]


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_every_page_can_be_reached_and_its_links_lead_somewhere(page: Path) -> None:
    assert page in reachable(README), "no page links to it"
    assert [target for target in local_links(page.read_text()) if not (page.parent / target).exists()] == []


def test_the_readmes_links_lead_somewhere() -> None:
    assert [target for target in local_links(README.read_text()) if not (ROOT / target).exists()] == []


def test_every_plugin_is_in_the_readme() -> None:
    text = README.read_text()
    assert [path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml") if f"plugins/{path.parent.name}" not in text] == []


def test_the_command_lines_page_is_current() -> None:
    made = subprocess.run([sys.executable, DOCS / "make_cli_page.py"], capture_output=True, text=True, timeout=150, check=False)
    assert made.returncode == 0, made.stderr
    assert made.stdout == (DOCS / "cli.md").read_text(), "run: python docs/make_cli_page.py > docs/cli.md"


def test_the_reference_is_current_and_has_every_name() -> None:
    made = subprocess.run(
        [sys.executable, DOCS / "make_reference_page.py"], capture_output=True, text=True, timeout=150, check=False
    )
    assert made.returncode == 0, made.stderr
    page = (DOCS / "reference.md").read_text()
    assert made.stdout == page, "run: python docs/make_reference_page.py > docs/reference.md"
    headings = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    assert {name for name in vars(enginery.api) if not name.startswith("_")} <= set(headings)


def test_the_reference_says_what_constructors_and_callables_take() -> None:
    page = (DOCS / "reference.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL))
    assert "\n__init__(context: ModelContext, weights: WeightSource, *, spec: LayerSpec" in sections["SelfAttention"]
    assert "\n__call__(q: torch.Tensor, k: torch.Tensor" in sections["AttendFn"]


def test_the_reference_marks_classes_that_are_made_by_keyword() -> None:
    page = (DOCS / "reference.md").read_text()
    made = {name: each for name, each in vars(enginery.api).items() if isinstance(each, type) and dataclasses.is_dataclass(each)}
    by_name = {name for name, each in made.items() if all(field.kw_only for field in dataclasses.fields(each))}
    assert {name for name in re.findall(r"^class (\w+).*  # by keyword$", page, re.MULTILINE) if name in made} == by_name
    assert by_name < made.keys()


def test_the_page_about_versions_states_those_of_the_groups() -> None:
    page = (DOCS / "versions.md").read_text()
    called = {
        HookGroup.ATTN_BACKEND: "The group of attention backends",
        HookGroup.EXECUTOR: "The executor group",
        HookGroup.GRAMMAR: "The group of grammars",
        HookGroup.MODEL: "The group of models",
        HookGroup.OP: "The group of operations",
        HookGroup.PARSER: "The group of parsers",
        HookGroup.SCHEDULE_POLICY: "The group of schedule policies",
    }
    later = {group: version for group, version in CONTRACT_VERSIONS.items() if version != (2, 0)}
    for group, (major, minor) in later.items():
        assert f"{called[group]} is at {major}.{minor}:" in page
    assert "All others are at 2.0." in page


def test_an_option_stands_once_on_the_command_lines_page_or_belongs_to_few_commands() -> None:
    lines = [line for line in (DOCS / "cli.md").read_text().splitlines() if line.startswith("| `-")]
    repeated = {line: lines.count(line) for line in lines if lines.count(line) > 5}
    assert not repeated


def test_shell_samples_use_commands_that_exist() -> None:
    cli_page, makefile = (DOCS / "cli.md").read_text(), (ROOT / "Makefile").read_text()
    pages = [README, ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]
    wrong = [f"{page.name}: {text}" for page in pages for text in unknown_commands(page.read_text(), cli_page, makefile)]
    assert not wrong, "\n".join(wrong)


def test_the_design_draws_every_room_and_the_order_of_imports() -> None:
    page, core = (DOCS / "design.md").read_text(), ROOT / "core" / "enginery"
    (order,) = re.findall(r"^    (cli > .*)$", page, re.MULTILINE)
    assert [set(names.split(", ")) for names in order.split(" > ")] == RANKS[::-1]
    folders = [path for path in core.rglob("*") if path.is_dir() and (path / "__init__.py").exists()]
    assert [path.name for path in folders if not re.search(rf"^ {{8,10}}{path.name}/ ", page, re.MULTILINE)] == []
    rooms = (ROOT / "CONTRIBUTING.md").read_text()
    assert [path.name for path in folders if path.parent == core and f"`{path.name}`" not in rooms] == []


def test_the_glossary_has_each_word_once_and_says_where_it_comes_from() -> None:
    lines = [line for line in (DOCS / "glossary.md").read_text().splitlines() if line.startswith("|")]
    assert lines[0] == "| word | means | from |"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row for row in rows if len(row) != 3 or not all(row)] == []
    words = [word for row in rows for word in row[0].split(", ")]
    assert [word for word in words if words.count(word) > 1] == []
    named = ("seat", "KV cache manager", "request table", "batch planner", "piecewise graph", "graph break", "TTFT", "ITL", "E2E")
    assert set(named) <= set(words)


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (DOCS / "dependencies.md").read_text()
    assert [name for name in (Requirement(line).name for line in project["dependencies"]) if f"| {name} |" not in text] == []


def test_a_name_that_is_gone_is_reported(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "a.py").write_text("LIMIT: int = 1\nclass A:\n    size = 2\n    async def go(self): ...\n")
    assert dangling("`core/a.py:A.go` `core/a.py:A.size` `core/a.py:LIMIT` `core/a.py`", tmp_path) == []
    assert dangling("`core/b.py` then `core/a.py:A.stop`", tmp_path) == ["core/b.py", "core/a.py:A.stop"]


def test_a_page_without_a_link_is_not_reached(tmp_path: Path) -> None:
    (tmp_path / "start.md").write_text("[b](b.md#there) [out](https://example.org/c.md)")
    (tmp_path / "b.md").write_text("[start](start.md)")
    (tmp_path / "c.md").write_text("")
    assert {path.name for path in reachable(tmp_path / "start.md")} == {"start.md", "b.md"}


def test_a_command_that_does_not_exist_is_reported() -> None:
    page = "## engine serve\n\n[all](#all-of-it)\n| `--port` |\n\n## engine plugins\n\n| `-p` |\n\n## All of it\n\n| `--seed` |\n"
    text = "```sh\nmake serve ARGS=x  # comment\nmake food\nengine serve M --port 1 --seed 2\nengine serve -p x\nengine fly\n```\n"
    assert unknown_commands(text, page, "serve: stamp\n") == ["make food", "engine serve -p", "engine fly"]
