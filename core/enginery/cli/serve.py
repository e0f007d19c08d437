"""`engine serve`: the OpenAI-compatible server."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from enginery.child_process import begun_ahead
from enginery.cli.flags.engine import naming, with_engine_flags
from enginery.cli.flags.server import SettingsFn, with_server_flags
from enginery.config.schema import EngineOptions
from enginery.serve.background_output import in_background
from enginery.serve.http.logs import dropped
from enginery.serve.start_display import StartDisplay


@with_engine_flags
@with_server_flags
def serve(
    options: EngineOptions,
    settings: SettingsFn,
    *,
    named: Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")] = None,
) -> None:
    """Serve a model over HTTP, with OpenAI's and Anthropic's APIs."""
    from enginery.cli.serve_checks import check_before_start

    with begun_ahead() as begun:  # it imports for longer than this process does
        checked = settings()  # first: a port that is taken is told before what takes seconds to import
        options = naming(options, named)
        check_before_start(options, host=checked.host, port=checked.port, dp=checked.dp)
        with in_background(dropped(checked.log_format)), StartDisplay() as display:
            from enginery.config.sources import registry_for
            from enginery.engine.ranks.ranks import check_ranks
            from enginery.serve.server import serve as run

            registry = registry_for(options)
            check_ranks(options, registry)
            run(options, registry, dataclasses.replace(checked, begun=begun), display)
