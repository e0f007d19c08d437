"""What a wrong command line is told, in the form of every other error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from enginery.config.sources import flags_of_others
from enginery.plugin.near import did_you_mean

# Typer has a click of its own, or takes the one that is installed; the parent of what it exports is what both raise.
UsageError: Any = typer.BadParameter.__mro__[1]


def told(error: Any, given: Sequence[str]) -> str:
    """The message for a `UsageError`, empty if the help was shown instead. given: the command line."""
    is_option = {"option_name", "possibilities"} <= vars(error).keys()  # click's unknown commands have possibilities too
    text = _no_option(error.option_name, given, error.ctx) if is_option else error.format_message().rstrip(".")
    command = " ".join(["engine", *given[: 1 + (given[:1] == ["bench"])]]) if error.ctx is None else error.ctx.command_path
    return f"{text}\n{command} --help shows how it is used" if text else ""


def _no_option(name: str, given: Sequence[str], context: Any) -> str:
    """The message for an unknown option. Typer looks up only the first of several letters behind one dash."""
    whole = next((each for each in given if each.startswith(name)), name).partition("=")[0]
    if answer := flags_of_others().get(whole.replace("_", "-")):
        return f"there is no option {whole}; {'here it is ' if answer.startswith('--') else ''}{answer}"
    known = [] if context is None else [option for each in context.command.params for option in (*each.opts, *each.secondary_opts)]
    options = [option for option in known if option.startswith("-")]
    return f"there is no option {whole}{did_you_mean(whole, options)}"
