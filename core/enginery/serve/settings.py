"""The settings of the server."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from enginery.child_process import ENGINE_COMMAND, Begun
from enginery.errors import ConfigError
from enginery.serve.http.connection import Limits
from enginery.serve.http.logs import LEVELS, LogFormat

_ORIGIN: Final = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\sA-Z]+")  # as browsers write it: small letters, and no path


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Checked when built: raises `ConfigError`.

    drain_s: how long running requests may go on after a signal. routes: plugins whose routes are added. watchdog_s: without a step
    for so long while there is work, the engine counts as stuck. restarts: of an engine that ended by itself. dp: data parallelism,
    engines behind this server. api_keys: one of them is needed, if there are any. admin_keys: for the routes of administrators,
    which are there only if there are any. allow_origins: of web pages that may ask. otlp_endpoint: where spans go.
    trust_request_chat_template: requests may bring chat templates of their own. max_body_bytes, max_total_body_bytes: of one
    request, and of all; None follows from the context.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 5.0
    watchdog_s: float = 60.0
    restarts: int = 0
    dp: int = 1
    use_generation_config: bool = True
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    trust_request_chat_template: bool = False
    routes: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    allow_origins: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    log_format: LogFormat = "text"
    log_level: str = "info"
    otlp_endpoint: str | None = None
    limits: Limits = field(default_factory=Limits)
    max_body_bytes: int | None = None
    max_total_body_bytes: int | None = None
    engine_command: Sequence[str] = ENGINE_COMMAND
    begun: Begun = field(default_factory=list, repr=False, compare=False)  # by that command

    def __post_init__(self) -> None:
        for key in (*self.api_keys, *self.admin_keys):
            _check_key(key)
        if {*self.api_keys} & {*self.admin_keys}:
            raise ConfigError("a key is a client's (--api-key) and an administrator's (--admin-key); make another for one of them")
        if self.log_level not in LEVELS:
            raise ConfigError(f"--log-level {self.log_level} is unknown; there are {', '.join(LEVELS)}")
        for origin in self.allow_origins:
            if not _ORIGIN.fullmatch(origin):
                why = "which no browser sends; write it as https://app.example or http://127.0.0.1:3000, or * for every page"
                raise ConfigError(f"--allow-origin is {origin!r}, {why}")
        _check_certificate(self.ssl_certfile, self.ssl_keyfile)

    def shown(self) -> Mapping[str, object]:
        """The settings that clients may see, as /server_info tells them. Keys are not among them."""
        same = ("host", "drain_s", "watchdog_s", "restarts", "dp", "routes", "trust_request_chat_template", "allow_origins")
        return {name: getattr(self, name) for name in same} | {
            "needs_key": bool(self.api_keys),
            "has_admin_routes": bool(self.admin_keys),
            "uses_tls": self.ssl_certfile is not None,
            "receive_s": self.limits.receive_s,
            "send_s": self.limits.send_s,
        }


def _check_key(key: str) -> None:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("a key is empty, or has characters that no header carries; use letters, digits and punctuation")


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    if key is not None and certificate is None:
        raise ConfigError("--ssl-keyfile is given without --ssl-certfile; give both, or one file with both as --ssl-certfile")
    if certificate is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        except OSError as error:
            needed = "it must be PEM: the certificate and its key, or the key in --ssl-keyfile"
            raise ConfigError(f"the certificate in {certificate} cannot be used: {error.strerror}; {needed}") from error


def refuse_blank(variable: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raises `ConfigError` for a variable that should have keys and has none: who set it wanted the server locked."""
    if variable in environ and not environ[variable].split():
        raise ConfigError(f"{variable} is set, but has no key in it; give it one, or unset it")


def read_keys(file: Path | None) -> tuple[str, ...]:
    """Read keys, one from a line; empty lines and those that begin with # are left out. Raises `ConfigError`."""
    if file is None:
        return ()
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the keys in {file} cannot be read: {why}") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{file} has no key; write one to a line")
    return keys
