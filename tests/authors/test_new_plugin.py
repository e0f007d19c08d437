"""Every kind of plugin is written with tests that pass, fits the hooks, and is found by the engine when it is installed."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import tomllib
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import quick_processes
from pairwise import EVERYTHING
from typer.testing import CliRunner

from enginery.cli.authors.new_plugin import _NAME, _OWN_PATHS, KINDS, write_plugin
from enginery.cli.main import build_app
from enginery.contracts.versions import HookGroup
from enginery.errors import ConfigError
from enginery.plugin.loading import _OTHER_OFFERS
from enginery.serve.api.service import Service
from enginery.serve.app import build_app as build_server
from enginery.testing.fixtures import TINY_CONFIG

LIST = """
import json
from enginery.plugin.registry import Registry
print(json.dumps({record.name: [record.status, record.reason, record.offers] for record in Registry.load().records}))
"""


def install(root: Path, site: Path) -> None:
    """As pip would, without it: the packages beside a .dist-info with the entry points."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {each}\n" for each in project["dependencies"])
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n{needs}")
    ((plugin, package),) = project["entry-points"]["enginery"].items()
    (info / "entry_points.txt").write_text(f"[enginery]\n{plugin} = {package}\n")
    (site / package).symlink_to(root / "src" / package)


def run(site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    how = {"cwd": cwd, "env": environ, "capture_output": True, "text": True, "timeout": 150, "check": False}
    return quick_processes.run_python(*arguments, **how)


def test_there_is_a_template_for_every_kind_that_the_registry_knows() -> None:
    assert {str(kind.group) for kind in KINDS.values()} == {str(group) for group in HookGroup} | set(_OTHER_OFFERS)


# Each beside no other where there is time for that; else one process runs the tests of all, and one finds them all.
TOGETHER = [(kind,) for kind in KINDS] if EVERYTHING else [tuple(KINDS)]


@pytest.mark.parametrize("kinds", TOGETHER, ids=lambda kinds: kinds[0] if len(kinds) == 1 else "all")
def test_a_new_plugin_is_found_and_its_tests_pass(kinds: tuple[str, ...], tmp_path: Path) -> None:
    site, roots = tmp_path / "site", [write_plugin(kind, "my-own", tmp_path) for kind in kinds]
    for root in roots:
        assert "@" not in "".join(
            path.read_text() for path in root.rglob("*") if path.is_file() and path.suffix in (".toml", ".md")
        )
        install(root, site)
    flags = ["-rA", "-p", "no:cacheprovider", "-W", "error", "--import-mode=importlib", "--rootdir", str(tmp_path)]
    flags += [] if EVERYTHING else ["-k", "not another-process", *quick_processes.PYTEST_FLAGS]
    done = run(site, "-m", "pytest", *flags, *(str(root / "tests") for root in roots), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"PASSED {root.name}/tests/" in done.stdout for root in roots)
    listed = run(site, "-c", LIST, cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    found = json.loads(listed.stdout)
    for kind in kinds:
        status, reason, offers = found[f"{KINDS[kind].prefix}-my-own"]
        assert (status, reason) == ("loaded", "")
        group = str(KINDS[kind].group)
        assert offers == [group if kind in ("observer", "route", "command") else f"{group}:my-own"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_runs_on_older_cores_of_the_same_contract_and_is_annotated(kind: str, tmp_path: Path) -> None:
    """State the higher minor version only if you use it, says docs/versions.md; and authors check their types."""
    made = write_plugin(kind, "my-own", tmp_path)
    assert [path.parent.parent.name for path in made.rglob("py.typed")] == ["src"]
    for path in (made / "src").rglob("*.py"):
        assert set(re.findall(r"api=\((\d+, \d+)\)", path.read_text())) <= {"2, 0"}
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        assert [function.name for function in functions if function.returns is None] == []


def test_the_command_says_what_to_do_next(tmp_path: Path) -> None:
    done = CliRunner().invoke(build_app(), ["new-plugin", "policy", "fair", "--into", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "pip install -e '.[test]'\n  pytest\n" in done.stdout  # of which a virtual environment that serves has none
    made = (tmp_path / "enginery-policy-fair" / "pyproject.toml").read_text()
    assert "pytest" in tomllib.loads(made)["project"]["optional-dependencies"]["test"][0]
    assert (tmp_path / "enginery-policy-fair" / "src" / "enginery_policy_fair" / "__init__.py").is_file()


def test_a_new_checkpoint_has_the_tiny_config_of_the_fixtures(tmp_path: Path) -> None:
    (made,) = write_plugin("checkpoint", "a", tmp_path).rglob("config.json")
    assert json.loads(made.read_text()) == dict(TINY_CONFIG)
    assert made.parent.name == "checkpoint"


def test_names_of_routes_are_refused_that_the_server_has() -> None:
    """They are written down, as to ask the server takes seconds."""
    paths = build_server(Service(engine=MagicMock(), loaded=Future())).openapi()["paths"]
    assert {*_OWN_PATHS} == {path[1:] for path in paths if _NAME.fullmatch(path[1:])}


def test_a_path_that_a_shell_would_split_is_quoted(tmp_path: Path) -> None:
    done = CliRunner().invoke(build_app(), ["new-plugin", "policy", "fair", "--into", str(tmp_path / "x y")])
    assert f"\n  cd '{tmp_path}/x y/enginery-policy-fair'\n" in done.stdout


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("polcy", "x", "no kind of plugin 'polcy'; did you mean policy"),
        ("policy", "No Spaces", "'No Spaces' cannot be the name of a plugin"),
        ("policy", "class", "'class' cannot be"),
        ("op", "lambda", "'lambda' cannot be the name of a plugin, as it is a word of Python; take another, as my-lambda"),
        ("op", "a" * 65, "'a{65}' cannot be the name of a plugin; take up to 64 small letters, digits and single hyphens"),
        ("op", "a" * 300, "^'a{79} cannot be the name of a plugin"),
        ("drafter", "auto", "no plugin's drafter can have the name 'auto', as Enginery itself uses it; take another, as my-auto"),
        *(
            (kind, "auto", f"no plugin's {kind} can have the name 'auto'")
            for kind, each in KINDS.items()
            if isinstance(each.group, HookGroup)
        ),
        *(("policy", name, f"no plugin's policy can have the name '{name}'") for name in ("fcfs", "shortest-first")),
        *(("executor", name, f"no plugin's executor can have the name '{name}'") for name in ("local", "join")),
        *(("drafter", name, f"no plugin's drafter can have the name '{name}'") for name in ("off", "standalone")),
        *(("command", name, f"no plugin's command can have the name '{name}'") for name in ("serve", "bench", "new-plugin")),
        ("parser", "none", "no plugin's parser can have the name 'none'"),
        ("route", "health", "no plugin's route can have the name 'health', as Enginery itself uses it; take another, as my-health"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(kind: str, name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        write_plugin(kind, name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "into", "why"),
    [("x", "file", "Not a directory"), ("x", "a" * 300, "File name too long")],
)
def test_what_cannot_be_written_is_told_in_a_line(name: str, into: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(build_app(), ["new-plugin", "policy", name, "--into", str(tmp_path / into)])
    assert isinstance(done.exception, ConfigError)
    assert re.fullmatch(rf"{tmp_path}\S* cannot be written: {why}", str(done.exception))


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_tests_need_beside_the_core_is_in_the_readme(kind: str, tmp_path: Path) -> None:
    root = write_plugin(kind, "my-own", tmp_path)
    tests = "".join(path.read_text() for path in (root / "tests").iterdir())
    readme = (root / "README.md").read_text()
    told = CliRunner().invoke(build_app(), ["new-plugin", kind, "my-other", "--into", str(tmp_path)]).stdout
    assert ("Its tests run an engine, which needs a plugin" in told) == ("Its tests run" in readme)
    assert ("LlamaForCausalLM" in readme) == ("open_tiny_llm" in tests and kind != "model")
    assert ("attention backend for the CPU" in readme) == ("open_tiny_llm" in tests and kind != "backend")


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    write_plugin("policy", "x", tmp_path)
    with pytest.raises(ConfigError, match="is there already"):
        write_plugin("policy", "x", tmp_path)


@pytest.mark.parametrize(("kind", "name"), [("model", "gemma"), ("op", "triton")])
def test_the_name_of_what_is_installed_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    """pip would uninstall that one, and with it what it serves."""
    with pytest.raises(ConfigError, match=rf"enginery-(model|ops)-{name} 0\.\S+ is installed, .*; take another name, as my-{name}"):
        write_plugin(kind, name, tmp_path)
    assert not list(tmp_path.iterdir())
