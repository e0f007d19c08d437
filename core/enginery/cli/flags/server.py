"""The flags of `engine serve` that are the server's, not the engine's. They are settings of the environment and of --config too."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_type_hints

import typer

from enginery.cli.flags.signature import Kind, flag, flags_of, option, with_flags
from enginery.config.schema import EngineOptions
from enginery.config.sources import settings_from
from enginery.errors import ConfigError

if TYPE_CHECKING:
    from enginery.serve.settings import ServeSettings

_SERVER: Final = "Server"
_ACCESS: Final = "Access"
_LIMITS: Final = "Limits"
_LOG: Final = "Logs and traces"


@dataclass(frozen=True, kw_only=True, repr=False)  # it has keys
class ServerFlags:
    """What a user may ask of the server, as the command line has it: a field is a flag, a variable and a key of --config."""

    host: Annotated[str, option(_SERVER, "Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, option(_SERVER, "0 takes a free one.", min=0, max=65535)] = 8000
    generation_config: Annotated[
        Literal["auto", "none"], option(_SERVER, "Use the checkpoint's recommended sampling, or none.")
    ] = "auto"
    tool_parser: Annotated[str, option(_SERVER, "Of tool calls: auto (what suits the model), none, or a name.", metavar="NAME")] = (
        "auto"
    )
    reasoning_parser: Annotated[
        str, option(_SERVER, "Of reasoning: auto (what suits the model), none, or a name.", metavar="NAME")
    ] = "auto"
    trust_request_chat_template: Annotated[
        bool,
        option(_ACCESS, "Let requests bring chat templates: code of clients, in a sandbox.", "--trust-request-chat-template"),
    ] = False
    route: Annotated[list[str] | None, option(_SERVER, "Add the HTTP routes of this plugin. Repeatable.")] = None
    api_key: Annotated[
        list[str] | None,
        option(_ACCESS, "Answer only who has this key. Repeatable.", envvar="ENGINERY_API_KEY", metavar="KEY"),
    ] = None
    api_key_file: Annotated[Path | None, option(_ACCESS, "The same, with a key on each line.")] = None
    admin_key: Annotated[
        list[str] | None,
        option(_ACCESS, "Add /admin, for who has this key. Repeatable.", envvar="ENGINERY_ADMIN_KEY", metavar="KEY"),
    ] = None
    admin_key_file: Annotated[Path | None, option(_ACCESS, "The same, with a key on each line.")] = None
    allow_origin: Annotated[list[str] | None, option(_ACCESS, "Let web pages of this origin ask. Repeatable.", metavar="URL")] = (
        None
    )
    ssl_certfile: Annotated[Path | None, option(_ACCESS, "Serve HTTPS with this certificate.")] = None
    ssl_keyfile: Annotated[Path | None, option(_ACCESS, "Its key, where it is not in the same file.")] = None
    drain_s: Annotated[float, option(_LIMITS, "Seconds that running requests may go on after a signal.", min=0)] = 5.0
    watchdog_s: Annotated[float, option(_LIMITS, "Seconds with work but no step after which it is stuck.", min=0.1)] = 60.0
    restarts: Annotated[
        int, option(_LIMITS, "How often an engine that ended by itself is started again, in all.", min=0, metavar="N")
    ] = 0
    dp: Annotated[int, option(_SERVER, "Data parallelism: engines behind this server, on this host.", min=1, metavar="N")] = 1
    receive_s: Annotated[float, option(_LIMITS, "Seconds that a request may take to arrive.", min=0.1)] = 60.0
    send_s: Annotated[float, option(_LIMITS, "Seconds that a client may read nothing.", min=0.1)] = 30.0
    max_body_bytes: Annotated[
        int | None, option(_LIMITS, "Of one request. Left out: what the context can hold.", min=1024, metavar="N")
    ] = None
    max_total_body_bytes: Annotated[
        int | None, option(_LIMITS, "Of all requests together. Left out: 8 times that.", min=1024, metavar="N")
    ] = None
    log_format: Annotated[Literal["text", "json"], option(_LOG, "Lines of text, or of JSON.")] = "text"
    log_level: Annotated[str, option(_LOG, "debug, info (a line per request), warning or error.")] = "info"
    otlp_endpoint: Annotated[str | None, option(_LOG, "Send OpenTelemetry spans to this collector.", metavar="URL")] = None


def _kind(kind: Kind) -> Kind:
    """What a setting is in a file: a path is text there."""
    given = get_args(kind)[0] if isinstance(kind, UnionType) else kind  # without None
    return str if given is Path else given


SettingsFn = Callable[[], "ServeSettings"]

_HINTS: Final = get_type_hints(ServerFlags)
_PATHS: Final = frozenset(name for name, kind in _HINTS.items() if Path in get_args(kind))
SERVER_KINDS: Final[Mapping[str, Kind]] = {name: _kind(kind) for name, kind in _HINTS.items()}


def with_server_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, whose second parameter makes the `ServeSettings`, the flags for them."""

    def settings(given: dict[str, Any]) -> SettingsFn:
        return functools.partial(_settings, _from_all_sources(given, given.pop("context")))

    return with_flags(command, [*flags_of(ServerFlags), flag("context", typer.Context, inspect.Parameter.empty)], settings, place=1)


def _from_all_sources(flags: dict[str, Any], context: typer.Context) -> ServerFlags:
    """The flags that were given; for the others what the environment, the file of --config or else the default says.

    Raises `ConfigError` that names the variable, or the key and the file.
    """
    engine = {field.name for field in fields(EngineOptions)}
    found = settings_from(SERVER_KINDS, os.environ, _path(context.params.get("config")), others=engine)
    parameters = {parameter.name: parameter for parameter in context.command.params}
    for name, each in found.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT"):
            continue
        try:
            value = parameters[name].process_value(context, each.value)
        except typer.BadParameter as error:
            raise ConfigError(f"{each.source} is {each.value!r}: {error.message}") from error
        flags[name] = _path(value) if name in _PATHS else value
    return ServerFlags(**flags)


def _path(value: str | Path | None) -> Path | None:
    """A path as the parameters have it: with typer 0.19 and 0.20 text, of which it makes a `Path` for the command alone."""
    return Path(value) if value is not None else None


def _settings(asked: ServerFlags) -> ServeSettings:
    """The flags as the server takes them, with the keys read. Raises `ConfigError`, for a port that is taken too."""
    from enginery.serve.http.listening import bind

    bind(asked.host, asked.port).close()

    from enginery.serve.http.connection import Limits
    from enginery.serve.settings import ServeSettings

    known = {field.name for field in fields(ServeSettings)}
    return ServeSettings(
        **{name: value for name, value in vars(asked).items() if name in known},
        use_generation_config=asked.generation_config == "auto",
        routes=tuple(asked.route or ()),
        api_keys=_keys("ENGINERY_API_KEY", asked.api_key, asked.api_key_file),
        admin_keys=_keys("ENGINERY_ADMIN_KEY", asked.admin_key, asked.admin_key_file),
        allow_origins=tuple(asked.allow_origin or ()),
        limits=Limits(receive_s=asked.receive_s, send_s=asked.send_s),
    )


def _keys(variable: str, given: Sequence[str] | None, file: Path | None) -> tuple[str, ...]:
    from enginery.serve.settings import read_keys, refuse_blank

    found = (*(given or ()), *read_keys(file))
    if not found:
        refuse_blank(variable)
    return found
