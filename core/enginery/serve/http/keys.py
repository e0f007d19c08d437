"""Who may ask: keys of clients and of administrators."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from enginery.serve.http.faults import Fault, Unauthorized

PUBLIC: Final = frozenset({"/", "/health", "/health/live", "/health/ready", "/health/progress"})
_PUBLIC_FILE: Final = re.compile(r"/assets(/[\w-][\w.-]*)+", re.ASCII)  # of a plugin's page, which asks for the key
_BEARER: Final = b"bearer "


class Keys:
    """Some keys, as their hashes. Takes as long for a wrong key as for a right one, whatever their lengths."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def which(self, headers: Iterable[tuple[bytes, bytes]]) -> int | None:
        """The place of the first of them that these headers have, as `Authorization: Bearer KEY` or `x-api-key: KEY`."""
        given = [_digest(key) for key in _given(headers)]
        fits = [sum(hmac.compare_digest(mine, theirs) for theirs in given) > 0 for mine in self._digests]  # all are compared
        return fits.index(True) if any(fits) else None


class KeyGuard:
    """ASGI middleware: whatever is not `PUBLIC`, to the letter, or below /assets/ needs a key; what does not exist too.

    The key's place is in the scope for what comes after, as `enginery.key`.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_public(scope["path"]):
            await self._app(scope, receive, send)
        elif (key := self._keys.which(scope["headers"])) is not None:
            scope["enginery.key"] = key
            await self._app(scope, receive, send)
        else:
            await Fault.of(Unauthorized()).response()(scope, receive, send)


def _is_public(path: str) -> bool:
    return path in PUBLIC or _PUBLIC_FILE.fullmatch(path) is not None


def _given(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    keys = [value for name, value in headers if name == b"x-api-key"]
    bearers = [value for name, value in headers if name == b"authorization" and value[: len(_BEARER)].lower() == _BEARER]
    return keys + [value[len(_BEARER) :].strip() for value in bearers]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
