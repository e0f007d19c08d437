"""`engine serve`: the OpenAI-compatible server."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Annotated

import typer

from enginery.cli.engine_flags import with_engine_flags
from enginery.config.schema import EngineOptions
from enginery.errors import ConfigError

_SERVER = "Server"


class GenerationConfig(StrEnum):
    """Whether requests get what generation_config.json recommends for the fields they leave out."""

    AUTO = "auto"
    NONE = "none"


@with_engine_flags
def serve(
    options: EngineOptions,
    *,
    named: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535, rich_help_panel=_SERVER)] = 8000,
    generation_config: Annotated[
        GenerationConfig, typer.Option(help="Use the checkpoint's recommended sampling, or none.", rich_help_panel=_SERVER)
    ] = GenerationConfig.AUTO,
    drain_s: Annotated[
        float, typer.Option(help="Seconds that running requests may go on after a signal.", min=0, rich_help_panel=_SERVER)
    ] = 5.0,
    route: Annotated[
        list[str] | None, typer.Option(help="Add the HTTP routes of this plugin. Repeatable.", rich_help_panel=_SERVER)
    ] = None,
) -> None:
    """Serve a model over HTTP, with OpenAI's API."""
    from enginery.plugin.registry import Registry
    from enginery.serve.server import ServeSettings
    from enginery.serve.server import serve as run

    if named is not None:
        if options.model not in (None, named):
            raise ConfigError(f"two models are named, {named} and {options.model} (--model, ENGINERY_MODEL or --config); name one")
        options = dataclasses.replace(options, model=named)
    registry = Registry.load(blocked=options.blocked_plugins, no_plugins=options.no_plugins, options=options.plugin_options)
    settings = ServeSettings(
        host=host,
        port=port,
        drain_s=drain_s,
        use_generation_config=generation_config is GenerationConfig.AUTO,
        routes=tuple(route or ()),
    )
    run(options, registry, settings)
