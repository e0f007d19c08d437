"""`make test` runs pytest twice at once: with work stealing, and the tests of real processes, whose servers a file shares."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from make_lines import ROOT, would_run

FAKE = """#!/bin/sh
case "$*" in *--ignore*) code=$ALONE run=others;; *) code=$PROCESSES run=processes;; esac
echo "$(nice) $@" >"$0.$run"
echo "printed by $run"
exit $code
"""


def test_both_lists_of_tests_of_processes_are_the_same() -> None:
    marked = re.search(r"^WITH_PROCESSES = \((.*)\)$", (ROOT / "conftest.py").read_text(), re.MULTILINE)
    apart = re.search(r"^with_processes := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert marked is not None
    assert apart is not None
    assert [path.rstrip("/") for path in re.findall(r'"(.+?)"', marked[1])] == apart[1].split()
    assert all((ROOT / path).exists() for path in apart[1].split())


@pytest.mark.parametrize(
    ("flags", "worker", "runs"),
    [
        (["-n", "2"], None, False),
        (["-n", "2"], "gw0", True),
        (["-n", "0"], None, True),
        (["-n", "2", "--pdb"], None, True),
        ([], None, True),
    ],
)
def test_who_hands_tests_to_others_imports_nothing_for_them(
    flags: list[str], worker: str | None, monkeypatch: pytest.MonkeyPatch, *, runs: bool
) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest", *flags])
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker is not None:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    assert runpy.run_path(str(ROOT / "conftest.py"))["pytest_plugins"] == ["every_test"] * runs


@pytest.mark.parametrize(
    ("alone", "processes", "fails"), [(0, 0, False), (1, 0, True), (0, 1, True), (5, 0, False), (0, 5, False), (5, 5, True)]
)
def test_a_failure_of_either_run_is_one_of_both_and_no_test_at_all_too(
    tmp_path: Path, alone: int, processes: int, *, fails: bool
) -> None:
    for name in (".serve", ".test", "bin/pytest"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(FAKE)
    (tmp_path / "bin/pytest").chmod(0o755)
    command = ["env", "-u", "MAKEFLAGS", "-u", "MAKELEVEL", f"ALONE={alone}", f"PROCESSES={processes}"]
    command += ["make", f"VENV={tmp_path}", "test", "JOBS=2", "ARGS=-k 'one or two'"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    assert done.stdout.splitlines()[:2] == ["printed by others", "printed by processes"]
    asked = {run: (tmp_path / f"bin/pytest.{run}").read_text() for run in ("others", "processes")}
    assert "-n 2 --dist worksteal --ignore=tests/chaos --ignore=tests/serve" in asked["others"]
    assert "-n 3 --dist loadfile tests/chaos tests/serve" in asked["processes"]
    assert all(words.endswith("-k one or two\n") for words in asked.values())
    niceness = {run: int(words.split()[0]) for run, words in asked.items()}
    assert niceness["others"] == min(19, niceness["processes"] + 19)


def test_named_files_are_run_at_once(tmp_path: Path) -> None:
    (command,) = [
        words for words in would_run(tmp_path, "test", "JOBS=2", "ARGS=tests/meta/test_tree.py::test_x -x") if "-rfER" in words
    ]
    assert command[-4:] == ["-n", "2", "tests/meta/test_tree.py::test_x", "-x"]
