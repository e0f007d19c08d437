"""What make would run."""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def would_run(folder: Path, *arguments: str) -> list[list[str]]:
    """The commands of `make` in a tree where nothing is installed yet, each as words."""
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "VENV", "DEVICE")}
    command = ["make", "--dry-run", f"VENV={folder / 'venv'}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True, env=environ)
    return [words for line in done.stdout.splitlines() if (words := shlex.split(line, comments=True))]


def editables(command: list[str]) -> list[str]:
    """What a pip command installs from this tree."""
    return [value for flag, value in itertools.pairwise(command) if flag == "-e"]


def built(commands: list[list[str]]) -> list[str]:
    """What is built of this tree in one process, to be installed from there."""
    return [project for command in commands for project in command[3:] if command[1].endswith("editable_wheels.py")]


def installs(folder: Path, *arguments: str) -> list[list[str]]:
    """The pip commands among those."""
    return [command for command in would_run(folder, *arguments) if "pip" in command[1:4]]
