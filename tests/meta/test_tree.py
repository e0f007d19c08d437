"""The tree as a whole: no machine's paths, no large files, no vague names, every plugin complete and listed."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LARGEST_BYTES = 1_000_000
LARGEST_WEIGHTS_BYTES = 16_000_000  # of the embedded model
MACHINE_PATH = re.compile(r"(?<![\w./<])/" + r"(?:work|tmp|root|home)(?=/|\b(?![.\w-]))")
VAGUE = {"utils", "util", "common", "helpers", "misc", "base", "manager2"}
# That measurements name: working copies whose commits were made anew. docs/benchmarks/README.md says so.
LOST_COMMITS = {"02f986e", "73ff3633"}
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))


@pytest.fixture(scope="module")
def files() -> list[Path]:
    """What git tracks or would track."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: cannot tell the tree's files from a machine's")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = (ROOT / name for name in sorted(set(listed.stdout.split("\0"))) if name)
    return [path for path in paths if path.is_file()]


def machine_paths(text: str) -> list[str]:
    """Lines that contain an absolute path of somebody's machine."""
    return [line.strip() for line in text.splitlines() if MACHINE_PATH.search(line)]


def commits_named(text: str) -> set[str]:
    """By the reports of a file of measurements."""
    return {name for value in re.findall(r'"commit": "([^"]*)"', text) for name in re.findall(r"\b[0-9a-f]{7,40}\b", value)}


def unlisted(names: list[str], tox: str) -> list[str]:
    """Plugins that tox does not install with the others, or does not test alone."""
    return [name for name in names if f"    -e plugins/{name}\n" not in tox or f"PLUGIN = plugins/{name}\n" not in tox]


def project_offences(text: str, folder: str) -> list[str]:
    """What is wrong with a plugin's pyproject.toml."""
    document = tomllib.loads(text)
    project, points = document["project"], document["project"].get("entry-points", {}).get("enginery", {})
    versions = re.compile(r"enginery\b(?!-).*<")
    checks = {
        "its name is not its folder's": project["name"] == folder,
        "its entry point is not named after it": list(points) == [folder.removeprefix("enginery-")],
        "its package is not named after it": list(points.values()) == [folder.replace("-", "_")],
        "it does not say which versions of enginery it is for": any(map(versions.match, project["dependencies"])),
        "it has settings of its own for ruff or mypy": not {"ruff", "mypy"} & document.get("tool", {}).keys(),
    }
    return [text for text, fine in checks.items() if not fine]


def test_no_file_names_a_path_of_one_machine(files: list[Path]) -> None:
    offences = []
    for path in files:
        if path.name != "tokenizer.json":  # a vocabulary may hold any word
            text = path.read_bytes().decode(errors="replace")
            offences += [f"{path.relative_to(ROOT)}: {line}" for line in machine_paths(text)]
    assert not offences, "\n".join(offences)


def test_no_file_is_large(files: list[Path]) -> None:
    weights = set(ROOT.glob("plugins/enginery-weights-tiny/src/*/*/model.safetensors"))
    assert len(weights) == 3
    assert [path for path in files if path.stat().st_size > (LARGEST_WEIGHTS_BYTES if path in weights else LARGEST_BYTES)] == []


def test_no_file_has_a_vague_name(files: list[Path]) -> None:
    assert [path for path in files if path.stem in VAGUE] == []


@pytest.mark.parametrize("folder", PLUGINS, ids=[folder.name for folder in PLUGINS])
def test_a_plugin_is_complete(folder: Path) -> None:
    package = folder / "src" / folder.name.replace("-", "_")
    wanted = [folder / "README.md", package / "__init__.py", package / "py.typed"]
    assert [path for path in wanted if not path.is_file()] == []
    assert list((folder / "tests").glob("test_*.py")), "it has no tests"
    assert project_offences((folder / "pyproject.toml").read_text(), folder.name) == []


@pytest.mark.parametrize("folder", PLUGINS, ids=[folder.name for folder in PLUGINS])
def test_a_plugin_brings_the_text_of_its_licence(folder: Path) -> None:
    """A link to the tree's: wheels and sdists have the text."""
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert "Apache-2.0" in project["license"].split()
    assert "LICENSE" in project.get("license-files", ["LICENSE"])  # setuptools finds it unless others are named


def test_copies_of_the_header_that_tells_calls_are_alike() -> None:
    copies = [path.read_text().partition("#pragma once")[2] for path in ROOT.glob("plugins/*/src/*/native/told.h")]
    assert len(copies) == 2
    assert len(set(copies)) == 1


def test_tox_knows_every_plugin() -> None:
    assert unlisted([folder.name for folder in PLUGINS], (ROOT / "tox.ini").read_text()) == []


@pytest.mark.parametrize("folder", ["work", "tmp", "root", "home"])
def test_a_machines_path_is_reported(folder: str) -> None:
    for bad in (f"cd /{folder}/x", f'"/{folder}"', f"(/{folder})", f"PATH=/{folder}/bin", f"a:/{folder}/x"):
        assert machine_paths(bad), bad
    for fine in (f"a/{folder}/b", f"https://example.org/{folder}/", f"docs/{folder}", f"/{folder}s", f"./{folder}/x"):
        assert not machine_paths(fine), fine


def test_a_plugin_that_tox_does_not_know_is_reported() -> None:
    tox = "    alone-a: PLUGIN = plugins/a\n    alone-b: PLUGIN = plugins/b\n    -e plugins/a\n"
    assert unlisted(["a", "b"], tox) == ["b"]


def test_an_odd_plugin_project_is_reported() -> None:
    good = '[project]\nname = "enginery-x"\ndependencies = ["enginery>=0.1,<0.2"]\nentry-points.enginery = {x = "enginery_x"}\n'
    assert project_offences(good, "enginery-x") == []
    for bad in (
        good.replace('"enginery-x"', '"other"'),
        good.replace("{x =", "{y ="),
        good.replace("enginery_x", "x"),
        good.replace(",<0.2", ""),
        good.replace("enginery>=", "enginery-y>="),
        good + "[tool.ruff]\n",
    ):
        assert len(project_offences(bad, "enginery-x")) == 1, bad


def test_what_was_measured_is_in_the_history() -> None:
    """A figure of a commit that nobody has cannot be measured again: name the one that was kept."""
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if not (ROOT / ".git").exists() or shallow.stdout.strip() != "false":
        pytest.skip("not a git checkout with its history")
    known = subprocess.run(["git", "rev-list", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    named = set().union(*(commits_named(path.read_text()) for path in (ROOT / "docs/benchmarks").glob("*.json")))
    assert len(named) > 50
    assert {name for name in named if not any(commit.startswith(name) for commit in known)} == LOST_COMMITS
    page = (ROOT / "docs/benchmarks/README.md").read_text()
    assert all(name in page for name in LOST_COMMITS)


def test_commits_are_found_in_reports() -> None:
    text = '{"commit": "02f986e with 9701f536\'s blocks", "device": "0989775", "commit": "0a1f5f96-dirty", "commit": "unknown"}'
    assert commits_named(text) == {"02f986e", "9701f536", "0a1f5f96"}
