"""One line, one span and one count for each HTTP request; never its body, its query or its headers."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from enginery.serve.http.metrics import RequestTimes
from enginery.serve.http.traces import Told, Tracer

_MAX_PATH_CHARS: Final = 200
_QUIET: Final = ("/health", "/metrics")
_ID: Final = b"x-request-id"
_FIT_FOR_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_SERVED: Final[ContextVar[list[RequestTimes] | None]] = ContextVar("served", default=None)
_log: Final = logging.getLogger(__name__)


def note_requests(times: Iterable[RequestTimes]) -> None:
    """Note that these requests of the engine belong to the HTTP request that is being answered, if there is one."""
    noted = _SERVED.get()
    if noted is not None:
        noted.extend(times)


class AccessLog:
    """ASGI middleware, which also answers with the client's `x-request-id`, or one of ours.

    answered: how often, by route and status; what matches no route is counted as one.
    """

    def __init__(self, app: ASGIApp, *, answered: Counter[tuple[str, int]], tracer: Tracer | None = None) -> None:
        self._app = app
        self._answered = answered
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, began_ns, status = time.monotonic(), time.time_ns(), 499  # what it stays if nobody waits for the answer
        given = next((value for name, value in scope["headers"] if name == _ID and _FIT_FOR_ID.fullmatch(value)), None)
        name = given or f"req_{uuid.uuid4().hex}".encode()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (_ID, name)]}
            await send(message)

        requests: list[RequestTimes] = []
        token = _SERVED.set(requests)
        try:
            await self._app(scope, receive, noting)
        finally:
            _SERVED.reset(token)
            route = scope.get("route")
            self._answered[route.path if route is not None else "other", status] += 1
            seconds = round(time.monotonic() - began_s, 6)
            told = _told(scope, status, requests, seconds=seconds) | {"x_request_id": name.decode()}
            quiet = scope["path"].startswith(_QUIET)
            _log.log(logging.DEBUG if quiet else logging.INFO, "%s %s", told["method"], told["path"], extra={"fields": told})
            if self._tracer is not None and not quiet:
                self._tracer.add(told, began_ns=began_ns, seconds=seconds, headers=scope["headers"])


def _told(scope: Scope, status: int, requests: list[RequestTimes], *, seconds: float) -> dict[str, Told]:
    told: dict[str, Told] = {
        "method": scope["method"][:16],
        "path": scope["path"][:_MAX_PATH_CHARS],
        "status": status,
        "seconds": seconds,
    }
    if not requests:
        return told
    first = requests[0]
    return told | {
        "request_id": first.request_id,
        "num_requests": len(requests),
        "prompt_tokens": sum(times.num_prompt for times in requests),
        "cached_tokens": sum(times.num_cached for times in requests),
        "output_tokens": sum(times.num_output for times in requests),
        "queued_s": round(first.queued_s, 6),
        "first_token_s": round(first.first_s - first.began_s, 6) if first.first_s else None,
        "reasons": sorted({str(times.reason or "open") for times in requests}),
    }
