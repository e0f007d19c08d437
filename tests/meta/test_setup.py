"""What `make serve`, `make test` and `make lint` install, read off what make would run."""

from __future__ import annotations

import configparser
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from make_lines import built, editables, installs, would_run
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
# Of hundreds of megabytes, or of no use to a server.
NOT_FOR_SERVING = {"triton", "transformers", "playwright", "mypy", "ruff", "pytest", "openai", "anthropic", "hypothesis"}

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def test_serving_requires_nothing_that_only_tests_need() -> None:
    for path in PROJECTS:
        required = {Requirement(line).name for line in tomllib.loads(path.read_text())["project"]["dependencies"]}
        assert not required & NOT_FOR_SERVING, path


def test_msgspec_is_one_that_knows_truth_values_as_literals() -> None:
    """Those before 0.22 raise `TypeError` for them when a body is first decoded."""
    schemas = "".join(path.read_text() for path in ROOT.glob("core/enginery/serve/schemas/*.py"))
    assert "Literal[False]" in schemas, "a lower bound will do now"
    bounds = []
    for path in PROJECTS:
        project = tomllib.loads(path.read_text())["project"]
        lines = [*project["dependencies"], *itertools.chain(*project.get("optional-dependencies", {}).values())]
        bounds += [wanted.specifier for line in lines if (wanted := Requirement(line)).name == "msgspec"]
    assert bounds
    assert not [bound for bound in bounds if bound.contains("0.21.1")]


def test_serve_installs_the_core_and_every_plugin_and_no_extras(tmp_path: Path) -> None:
    tree = built(would_run(tmp_path, "serve"))
    assert tree[0] == "."
    assert sorted(tree[1:]) == sorted(path.parent.relative_to(ROOT).as_posix() for path in PROJECTS[1:])
    commands = installs(tmp_path, "serve")
    assert not [word for command in commands for word in command if "[" in word or word == "-e"]
    assert len([command for command in commands if command[-1].endswith("*.whl")]) == 1, (
        "in two, one could take a stranger's enginery"
    )


def test_what_is_served_drafts_for_itself_unless_asked_otherwise(tmp_path: Path) -> None:
    """Flags that come later win."""
    (serve,) = [words for words in would_run(tmp_path, "serve", "ARGS=--drafter off") if "serve" in words]
    assert serve[-4:] == ["--drafter", "auto", "--drafter", "off"]


@pytest.mark.parametrize(("target", "is_set_up"), [("venv", False), ("test", False), ("test", True)])
@pytest.mark.parametrize("place", [".", "plugins/some"])
def test_a_tree_that_cannot_be_written_to_is_said_in_one_line(target: str, is_set_up: bool, place: str, tmp_path: Path) -> None:
    tree, venv = tmp_path / "tree", tmp_path / "venv"
    (tree / "plugins/some").mkdir(parents=True)
    for file in ("pyproject.toml", "constraints.txt", "plugins/some/pyproject.toml"):
        (tree / file).touch()
    shutil.copy(ROOT / "Makefile", tree)
    shell = tmp_path / "shell"  # in which that place cannot be written to: root may write everywhere
    shell.write_text(f"""#!/bin/sh\nexec /bin/sh -c 'test() {{ [ "$*" != "-w {place}" ]; }}; '"$2"\n""")
    shell.chmod(0o755)
    venv.mkdir()
    for made in (".serve", ".test") if is_set_up else ():
        (venv / made).touch()
    command = ["make", target, f"VENV={venv}", f"PYTHON={sys.executable}", f"SHELL={shell}"]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(command, cwd=tree, check=False, capture_output=True, text=True, env=environment)
    told, ended = done.stderr.splitlines()
    assert told.startswith(f"{tree}/{place} cannot be written to, ")
    assert ended.startswith("make: ***")
    assert done.stdout == ""


@pytest.mark.parametrize("venv", ["", "my venv", "/ct/my venv"])
def test_a_virtual_environment_whose_path_is_none_or_several_is_refused(venv: str, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        would_run(tmp_path, "clean", f"VENV={venv}")
    assert f'VENV must be a path without spaces, not "{venv}"' in error.value.stderr


def test_wheels_of_a_project_that_changed_are_made_and_installed_anew(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    wheels = tmp_path / "wheels"
    for version in ("1", "2"):
        (project / "pyproject.toml").write_text(f'[project]\nname = "some"\nversion = "{version}"\n')
        command = [sys.executable, str(ROOT / "plugins/editable_wheels.py"), str(wheels), str(project)]
        subprocess.run(command, check=True, capture_output=True)
        (made,) = wheels.iterdir()
        assert made.name.startswith(f"some-{version}-")
    (project / "pyproject.toml").write_text("[project]\nname = 3\n")
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"{project} cannot be built" in done.stderr
    names = [tomllib.loads(path.read_text())["project"]["name"] for path in PROJECTS]
    (removed,) = [words for words in installs(tmp_path, "serve") if "uninstall" in words]
    assert sorted(removed[-len(names) :]) == sorted(names), "pip would leave those of the same version as they are"


def test_no_project_of_the_tree_is_built_in_an_environment_of_its_own(tmp_path: Path) -> None:
    commands = installs(tmp_path, "serve", "test", "lint")
    assert "setuptools>=77" in commands[0], "what builds them comes first"
    assert not [command for command in commands if editables(command) and "--no-build-isolation" not in command]
    assert {tuple(tomllib.loads(path.read_text())["build-system"]["requires"]) for path in PROJECTS} == {("setuptools>=77",)}


@pytest.mark.parametrize(("target", "extra"), [("test", ".[test]"), ("lint", ".[lint]")])
def test_tests_and_lint_add_theirs_to_what_serves(target: str, extra: str, tmp_path: Path) -> None:
    serving, both = installs(tmp_path, "serve"), installs(tmp_path, target)
    assert both[: len(serving)] == serving
    assert [editables(command)[0] for command in both[len(serving) :]] == [extra]


def test_lint_looks_at_the_types_of_what_makes_pages_and_of_what_measures(tmp_path: Path) -> None:
    checked = {
        Path(word) for words in would_run(tmp_path, "lint") if any(each.endswith("/mypy") for each in words) for word in words
    }
    for folder in ("docs", "docs/benchmarks"):
        scripts = {path.relative_to(ROOT) for path in (ROOT / folder).glob("*.py")}
        assert scripts
        assert scripts <= checked


def test_what_interprets_a_gpus_kernels_comes_with_the_tests_on_a_cpu(tmp_path: Path) -> None:
    have = [
        path
        for path in PROJECTS[1:]
        if "interpreter" in tomllib.loads(path.read_text())["project"].get("optional-dependencies", {})
    ]
    assert len(have) >= 2
    wanted = [f"{path.parent.relative_to(ROOT).as_posix()}[interpreter]" for path in have]
    assert sorted(editables(installs(tmp_path, "test", "DEVICE=cpu")[-1])[1:]) == sorted(wanted)
    assert editables(installs(tmp_path, "test", "DEVICE=cuda")[-1])[1:] == []


def test_lint_beside_the_tests_does_not_install_beside_them(tmp_path: Path) -> None:
    ends = [editables(command)[0] for command in installs(tmp_path, "-j2", "lint", "test")[-2:]]
    assert ends == [".[test]", ".[lint]"]


def test_only_a_machine_without_a_gpu_gets_torch_for_cpus(tmp_path: Path) -> None:
    def indexes(*arguments: str) -> list[str]:
        return [word for command in installs(tmp_path, "serve", *arguments) for word in command if word.startswith("http")]

    assert indexes("DEVICE=cpu") == ["https://download.pytorch.org/whl/cpu"]
    assert indexes("DEVICE=cuda") == []


def test_a_gpu_gets_the_torch_that_kernels_ran_with(tmp_path: Path) -> None:
    """All else has the same version everywhere."""
    usual = (ROOT / "constraints.txt").read_text()
    assert "\ntorch==2.13.0\n" in usual
    for device, constraints in (("cpu", "constraints.txt"), ("cuda", str(tmp_path / "venv/constraints.txt"))):
        commands = installs(tmp_path, "test", "lint", f"DEVICE={device}")
        assert {command[command.index("-c") + 1] for command in commands if "install" in command} == {constraints}
    ((*changes, _, made),) = [words for words in would_run(tmp_path, "serve", "DEVICE=cuda") if words[0] == "sed"]
    assert made == constraints
    changed = subprocess.run(changes, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert changed == usual.replace("\ntorch==2.13.0\n", "\ntorch==2.11.0\n")


@pytest.mark.parametrize("project", PROJECTS[1:], ids=lambda path: path.parent.name)
def test_tox_tries_every_plugin_alone_and_beside_the_others(project: Path) -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    folder = f"plugins/{project.parent.name}"
    short = project.parent.name.removeprefix("enginery-").replace("-", "_")
    assert f"-e {folder}" in tox["all"]["deps"].split("\n")
    assert f"alone-{short}: PLUGIN = {folder}" in tox["testenv"]["set_env"]
    assert re.search(rf"alone-\{{.*\b{short}\b.*\}}", tox["tox"]["env_list"])
    if any("write_tiny_checkpoint" in path.read_text() for path in project.parent.glob("tests/*.py")):
        needed = {f"alone-{short}: -e plugins/enginery-{name}" for name in ("model-llama", "attn-torch")}
        assert needed <= set(tox["testenv"]["deps"].split("\n")), "its tests run a Llama"
