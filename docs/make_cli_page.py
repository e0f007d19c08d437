"""Prints docs/cli.md, the page of every command and option: `python docs/make_cli_page.py > docs/cli.md`."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import typer

from enginery.cli.main import app

HEAD = """\
# Command line

`docs/make_cli_page.py` makes this page from the commands themselves; a test fails when it is out of date. Options that several
commands take stand once, at the end: {links}.

Every command ends with one of these statuses:

- 0: it did what was asked;
- 1: it failed, or found something wrong;
- 2: its command line, its settings or its model cannot be used;
- 130: Ctrl-C. Where that is how one leaves, in `engine serve` after a second or two and in `engine chat`, it is 0.

Tables are as wide as the terminal, or COLUMNS. In a pipe each row is one line. NO_COLOR switches colours off.
"""

# Options that several commands share, by the panels of their help.
SHARED = {
    "Settings of the engine": ("Model", "Device and parts", "Memory and batching", "Plugins"),
    "Sampling": ("Sampling",),
    "Report": ("Report",),
    "Kit": ("Kit",),
}


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


def rows(parameters: Iterable[Any]) -> list[str]:
    """A line for each argument and option."""
    lines = []
    for parameter in parameters:
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        names = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
        if not parameter.opts[0].startswith("-"):
            names = f"`{parameter.metavar or parameter.name.upper()}`"
        elif parameter.metavar:
            names += f" {parameter.metavar}"
        value, text = described(parameter)
        lines.append(f"| {names} | {value} | {text} |")
    return lines


def shared(found: Iterable[Any]) -> dict[str, list[str]]:
    """Of each table that stands once, the lines that every command with some of them has."""
    tables: dict[str, list[str]] = {}
    for heading, panels in SHARED.items():
        every = [lines for command in found if (lines := rows(each for each in command.params if panel(each) in panels))]
        tables[heading] = [line for line in every[0] if all(line in lines for lines in every)]
    return tables


def panel(parameter: Any) -> str:
    """Where the help shows it."""
    return str(getattr(parameter, "rich_help_panel", ""))


def link(heading: str) -> str:
    """To a table that stands once."""
    return f"[{heading.lower()}](#{heading.lower().replace(' ', '-')})"


def section(heading: str, text: str, lines: list[str]) -> str:
    """A heading, a paragraph where there is one, and a table where there is one."""
    table = "\n".join(["| option | default | what it does |", "|---|---|---|", *lines]) + "\n" if lines else ""
    return "\n".join(filter(None, (f"## {heading}\n", f"{text}\n" if text else "", table)))


def page() -> str:
    """The whole page."""
    found = dict(commands(typer.main.get_command(app), "engine"))
    tables = shared(found.values())
    parts = [HEAD.format(links=", ".join(map(link, tables)))]
    for name, command in found.items():
        text = inspect.cleandoc(command.help or "").split(chr(12))[0].strip()
        lines = rows(command.params)
        used = [heading for heading, common in tables.items() if set(common) <= set(lines)]
        own = [line for line in lines if not any(line in tables[heading] for heading in used)]
        parts.append(section(name, text + (f" Takes also: {', '.join(map(link, used))}." if used else ""), own))
    parts += [section(heading, "", lines) for heading, lines in tables.items()]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
