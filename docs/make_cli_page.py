"""Prints docs/cli.md, the page of every command and option: `python docs/make_cli_page.py > docs/cli.md`."""

from __future__ import annotations

import inspect
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


def cell(text: str | None) -> str:
    """One line of a table."""
    return " ".join((text or "").split()).replace("|", "\\|")


def default(parameter: Any) -> str:
    """What holds if it is not given, where that says something."""
    if parameter.default is None or parameter.default in ("", [], ()) or callable(parameter.default):
        return "required" if parameter.required else ""
    if isinstance(parameter.default, bool) and not parameter.secondary_opts:
        return ""
    return f"`{str(parameter.default).lower() if isinstance(parameter.default, bool) else parameter.default}`"


def rows(command: Any) -> Iterator[str]:
    """A line for each argument and option."""
    for parameter in command.params:
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        if parameter.opts[0].startswith("-"):
            names = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
        else:
            names = f"`{parameter.name.upper()}`"
        yield f"| {names} | {cell(default(parameter))} | {cell(parameter.help)} |"


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
