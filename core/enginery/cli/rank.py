"""`engine rank`: a rank of an engine that runs on another host."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Final

import typer

from enginery.errors import ConfigError

_OWN: Final = "Where this host differs from the engine's"
_Join = Annotated[str | None, typer.Option(metavar="tcp://ADDRESS:PORT", help="Where the engine listens: its --listen.")]
_KeyFile = Annotated[
    str | None, typer.Option(metavar="FILE", envvar="ENGINERY_RANK_KEY_FILE", help="The same key as the engine's; - is stdin.")
]
_Number = Annotated[int | None, typer.Option("--rank", metavar="N", min=1, help="The rank to be, from 1; without it, any.")]
_Wait = Annotated[float, typer.Option(metavar="SECONDS", min=0.0, help="How long the engine may take to listen.")]
_NewKey = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a new key for an engine and its ranks; nothing else.")]
_Model = Annotated[str | None, typer.Option("--model", "-m", help="The same model, elsewhere.", rich_help_panel=_OWN)]
_DraftModel = Annotated[str | None, typer.Option(help="The same draft model, elsewhere.", rich_help_panel=_OWN)]
_Threads = Annotated[int | None, typer.Option(min=1, help="Threads of this rank; without it, all.", rich_help_panel=_OWN)]
_Memory = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Share of the free memory that it may take.", rich_help_panel=_OWN)
]


def rank(
    *,
    join: _Join = None,
    rank_key_file: _KeyFile = None,
    number: _Number = None,
    wait_s: _Wait = 600.0,
    new_key: _NewKey = None,
    model: _Model = None,
    draft_model: _DraftModel = None,
    num_threads: _Threads = None,
    memory_fraction: _Memory = None,
) -> None:
    """Be one of the ranks of an engine on another host (engine serve --executor join), under any launcher.

    It ends with the engine. What the rank writes goes to stderr, and its status is 0 when the engine ended it.
    """
    from enginery.engine.ranks import join as joining
    from enginery.engine.ranks.keys import RankKey

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if new_key is not None:
        RankKey.new().write(new_key)
    elif join is None or rank_key_file is None:
        raise ConfigError("give --join tcp://ADDRESS:PORT and --rank-key-file FILE, or --new-key FILE to make a key")
    else:
        own = joining.OwnOptions(model=model, draft_model=draft_model, num_threads=num_threads, memory_fraction=memory_fraction)
        if code := joining.join(join, RankKey.read(rank_key_file), own, rank=number, wait_s=wait_s):
            raise typer.Exit(code)
