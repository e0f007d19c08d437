"""Prints docs/cli.md, the page of every command and option: `python docs/make_cli_page.py > docs/cli.md`."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import typer

from enginery.cli.main import app

HEAD = """\
# Command line

Made by `docs/make_cli_page.py` from the commands themselves; a test fails when it is out of date.
"""


def commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command below `group` with its full name, in alphabetical order."""
    for word, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        yield f"{name} {word}", command
        if isinstance(command, typer.core.TyperGroup):
            yield from commands(command, f"{name} {word}")


TOLD = re.compile(r"\s*\[dim\]\\\[default: (.*)\]\[/dim\]$")  # a default that a help text tells, in rich's markup


def described(parameter: Any) -> tuple[str, str]:
    """What holds if it is not given, where that says something; and the help."""
    text = parameter.help or ""
    if told := TOLD.search(text):
        value, text = told[1], text[: told.start()]
    elif parameter.required:
        value = "required"
    else:
        value = "" if parameter.default in (None, "", [], ()) else str(parameter.default)
    if value == "False" and not parameter.secondary_opts:
        value = ""
    return value, " ".join(text.split()).replace("|", "\\|")


def rows(command: Any) -> Iterator[str]:
    """A line for each argument and option."""
    for parameter in command.params:
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        names = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
        if not parameter.opts[0].startswith("-"):
            names = f"`{parameter.name.upper()}`"
        elif parameter.metavar:
            names += f" {parameter.metavar}"
        value, text = described(parameter)
        yield f"| {names} | {value} | {text} |"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, command in commands(typer.main.get_command(app), "engine"):
        parts.append(f"## {name}\n\n{inspect.cleandoc(command.help or '').split(chr(12))[0].strip()}\n")
        if lines := list(rows(command)):
            parts.append("\n".join(["| option | default | what it does |", "|---|---|---|", *lines]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
