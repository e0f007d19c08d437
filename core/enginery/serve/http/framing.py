"""What HTTP asks for before a route is looked up: HEAD wherever there is GET, one length for one body, and URLs that are whole."""

from __future__ import annotations

import re
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from enginery.errors import RequestError
from enginery.serve.http.faults import Fault

_ORIGIN: Final = re.compile(r"https?://[^/]*", re.IGNORECASE)


class Framing:
    """ASGI middleware. The server leaves the bodies of answers to HEAD out, whoever writes them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a body of two lengths, which a proxy may end elsewhere, and close the connection (RFC 9112, 6.3)."""
        names = {name for name, _ in scope.get("headers", ())}
        if {b"content-length", b"transfer-encoding"} <= names:
            fault = Fault.of(RequestError("a request has Content-Length or Transfer-Encoding, not both"))
            answer = fault.response()
            answer.headers["connection"] = "close"
            await answer(scope, receive, send)
            return
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        if scope["type"] == "http" and (found := _ORIGIN.match(scope["path"])):  # as clients write it for a proxy (RFC 9112, 3.2.2)
            scope = {**scope, "path": scope["path"][found.end() :] or "/"}
        await self._app(scope, receive, send)
