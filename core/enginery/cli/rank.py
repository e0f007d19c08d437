"""`engine rank`: a rank of an engine that runs on another host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from enginery.cli.flags.signature import flags_of, option, with_flags
from enginery.errors import ConfigError

_OWN: Final = "Where this host differs from the engine's"
_Join = Annotated[str | None, typer.Option(metavar="tcp://ADDRESS:PORT", help="Where the engine listens: its --listen.")]
_KeyFile = Annotated[
    str | None, typer.Option(metavar="FILE", envvar="ENGINERY_RANK_KEY_FILE", help="The same key as the engine's; - is stdin.")
]
_Number = Annotated[int | None, typer.Option("--rank", metavar="N", min=1, help="The rank to be, from 1; without it, any.")]
_Wait = Annotated[float, typer.Option(metavar="SECONDS", min=0.0, help="How long the engine may take to listen.")]
_NewKey = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a new key for an engine and its ranks; nothing else.")]


@dataclass(frozen=True, kw_only=True)
class HostFlags:
    """What is otherwise on this host than on the engine's: see `EngineOptions`."""

    model: Annotated[str | None, option(_OWN, "The same model, elsewhere.", "--model", "-m")] = None
    draft_model: Annotated[str | None, option(_OWN, "The same draft model, elsewhere.")] = None
    num_threads: Annotated[int | None, option(_OWN, "Threads of this rank; without it, all.", min=1)] = None
    memory_fraction: Annotated[float | None, option(_OWN, "Share of the free memory that it may take.", min=0.0, max=1.0)] = None


def _with_host_flags(command: Callable[..., None]) -> Callable[..., None]:
    return with_flags(command, flags_of(HostFlags), lambda given: HostFlags(**given))


@_with_host_flags
def rank(
    host: HostFlags,
    *,
    join: _Join = None,
    rank_key_file: _KeyFile = None,
    number: _Number = None,
    wait_s: _Wait = 600.0,
    new_key: _NewKey = None,
    context: typer.Context,
) -> None:
    """Be one of the ranks of an engine on another host (engine serve --executor join), under any launcher.

    It ends with the engine. What the rank writes goes to stderr, and its status is 0 when the engine ended it.
    """
    from enginery.engine.ranks import join as joining
    from enginery.engine.ranks.keys import RankKey

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if new_key is not None:
        if others := [flag for flag in _given(context) if flag != "--new-key"]:
            raise ConfigError(f"--new-key FILE alone makes a key, and nothing else; leave out {', '.join(others)}")
        RankKey.new().write(new_key)
    elif join is None or rank_key_file is None:
        raise ConfigError("give --join tcp://ADDRESS:PORT and --rank-key-file FILE, or --new-key FILE alone to make a key")
    else:
        if code := joining.join(join, RankKey.read(rank_key_file), vars(host), rank=number, wait_s=wait_s):
            raise typer.Exit(code)


def _given(context: typer.Context) -> list[str]:
    """The flags on the command line."""
    sources = {parameter.opts[0]: context.get_parameter_source(str(parameter.name)) for parameter in context.command.params}
    return [flag for flag, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
