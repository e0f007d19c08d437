"""One client's connection: uvicorn's, with bounds on what it may send and on how slowly it may send and read."""

from __future__ import annotations

import asyncio
import math
import sys
from dataclasses import dataclass
from typing import Any, Final

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from enginery.serve.http.faults import Fault
from enginery.serve.http.listening import BEYOND, Refusals

CROWDED: Final = (503, "too_many_connections", "too many connections are open; try again later")
_LINGER_S: Final = 1.0
_WRITE_BUFFER_BYTES: Final = 64 << 10
_MAX_PIECES: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on a connection. receive_s: for a request to arrive, head and body. send_s: that a client may read nothing."""

    receive_s: float = 60.0
    send_s: float = 30.0
    num_connections: int = 4096
    header_bytes: int = 64 << 10


class _BoundedRequests(h11.Connection):
    """h11 bounds a head only while it waits for the rest of it, and one packet may bring all of it; and it bounds no chunks.

    Each chunk takes ten microseconds, however little is in it.
    """

    def __init__(self, header_bytes: int) -> None:
        super().__init__(h11.SERVER, header_bytes)
        self._header_bytes = header_bytes
        self._num_pieces = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next part of a request, as h11 gives it. Raises `h11.RemoteProtocolError` for what is too large."""
        num_waiting = len(self.trailing_data[0]) if self.their_state is h11.IDLE else 0
        event = super().next_event()
        if isinstance(event, h11.Request) and num_waiting - len(self.trailing_data[0]) > self._header_bytes:
            raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
        self._num_pieces = 0 if isinstance(event, h11.Request) else self._num_pieces + isinstance(event, h11.Data)
        if self._num_pieces > _MAX_PIECES:
            raise h11.RemoteProtocolError("the body comes in too many pieces", error_status_hint=413)
        return event


class LimitedConfig(uvicorn.Config):
    """The settings of the HTTP server: uvicorn's, which are passed on, and the bounds of this server."""

    def __init__(self, app: ASGIApp, limits: Limits, refusals: Refusals, **settings: Any) -> None:
        super().__init__(app, http=Connection, h11_max_incomplete_event_size=limits.header_bytes, **settings)
        self.limits = limits
        self.refusals = refusals
        self.beyond: dict[Connection, None] = {}  # the bound, the oldest first


class Connection(H11Protocol):
    """Refuses with 408, 431 or 503 before the application is asked, and closes on a client that does not read.

    Beyond the bound on connections a few more are open, each until a newer one needs its place: there the probes are answered, and
    everything else is refused.
    """

    def __init__(
        self,
        config: LimitedConfig,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = config.limits
        self._beyond = config.beyond
        self._refusals = config.refusals
        self.conn = _BoundedRequests(config.limits.header_bytes)
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time for the first request, and see whether there is room for the connection."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        if len(self.connections) - len(self._beyond) > self._limits.num_connections:
            self.app = self._answer_probes(self.app)
            self._beyond[self] = None
            if len(self._beyond) > BEYOND:
                next(iter(self._beyond))._make_room()
        self._time_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks of a connection that has ended."""
        for timer in (self._receiving, self._sending):
            if timer is not None:
                timer.cancel()
        self._beyond.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in bytes of a request; those of a refused one are dropped."""
        if not self._is_refused:
            super().data_received(data)
            self._time_request()

    def send_400_response(self, msg: str) -> None:
        """Answer to what is not HTTP, with the status that h11 proposes."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431:
            self._refuse(431, "headers_too_large", f"the head of the request is larger than {self._limits.header_bytes:,} bytes")
        elif status == 413:
            self._refuse(413, "too_many_chunks", f"the body comes in more than {_MAX_PIECES:,} chunks; send larger ones")
        else:
            self._refuse(status, "no_http", f"this is not HTTP/1.1{f': {error}' if error else ''}")

    def pause_writing(self) -> None:
        """The client reads too slowly: it must go on reading, or the connection is closed."""
        super().pause_writing()
        self._time_reading()

    def resume_writing(self) -> None:
        """The client reads again."""
        if self._sending is not None:
            self._sending.cancel()
        super().resume_writing()

    def _time_reading(self, before: float = math.inf) -> None:
        """Close the connection if no fewer bytes wait than `before`; else look again when the time is over."""
        if (left := self.transport.get_write_buffer_size()) < before:
            self._sending = self.loop.call_later(self._limits.send_s, self._time_reading, left)
        else:
            self.transport.abort()

    def _time_request(self) -> None:
        """Start or stop the time for a request. Head and body share one time, which begins with the first byte."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY) or self._is_refused:
            if self._receiving is not None:
                self._receiving.cancel()
            self._receiving = None
        elif self._receiving is None:
            within_s = self._limits.receive_s
            told = f"the request did not arrive whole within {within_s:g} s; send it faster, or raise --receive-s"
            self._receiving = self.loop.call_later(within_s, self._refuse, 408, "too_slow", told)

    def _answer_probes(self, app: ASGIApp) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_and_close(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
                await send(message)

            if scope["path"].startswith("/health"):
                await app(scope, receive, send_and_close)
            else:
                self._refuse(*CROWDED)

        return answer

    def _make_room(self) -> None:
        del self._beyond[self]
        if not self._is_refused:
            self._refuse(*CROWDED)
        self.transport.close()

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer if nothing was, and close when the client has had a moment to read it."""
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if status == CROWDED[0]:
            self._refusals.add(f"{self._limits.num_connections} are open, which is all that may be")
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            self.transport.write(refusal_of(self.conn, status, code, message))
            if self.transport.can_write_eof():
                self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)


def refusal_of(conn: h11.Connection, status: int, code: str, message: str) -> bytes:
    """The bytes of an answer that refuses a request; the connection is closed after it."""
    kind = "invalid_request_error" if status < 500 else "unavailable_error"
    body = Fault(status=status, message=message, type=kind, code=code).body()
    headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
    headers += [("retry-after", "1")] if status == 503 else []
    events = (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage())
    return b"".join(conn.send(event) or b"" for event in events)
