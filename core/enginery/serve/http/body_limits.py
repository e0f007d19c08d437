"""How many bytes of bodies are taken: of one request, and of all that are being answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from enginery.serve.http.faults import BodyTooLarge, TooManyBodies

_LEAST_BYTES: Final = 8 << 20  # a batch of a thousand prompts of a thousand tokens, or large schemas beside a small context
_BYTES_PER_TOKEN: Final = 64  # tokens are 4 or 5 characters long; a character takes up to 6 bytes where JSON escapes it
_MOST_BYTES: Final = 32 << 20
_TOTAL: Final = 8
_FREE_BYTES: Final = 64 << 10


@dataclass(frozen=True, kw_only=True)
class BodyLimits:
    """Bounds in bytes. one: of one body. total: of all but the first 64 KiB of each, so that large ones block no small one."""

    one: int
    total: int

    @classmethod
    def of(cls, max_model_len: int, *, one: int | None = None, total: int | None = None) -> BodyLimits:
        """The limits for a context of `max_model_len` tokens. one, total: bytes that the operator chose instead."""
        one = min(_LEAST_BYTES + _BYTES_PER_TOKEN * max_model_len, _MOST_BYTES) if one is None else one
        return cls(one=one, total=_TOTAL * one if total is None else total)


class BodyBounds:
    """ASGI middleware. Reading a body raises `BodyTooLarge` and `TooManyBodies`.

    Bytes count from their arrival until the request is answered, as what they become is there so long.
    """

    def __init__(self, app: ASGIApp, limits: Callable[[], BodyLimits]) -> None:
        self._app = app
        self._limits = limits
        self._num_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = _announced(scope)
        num_read = num_held = 0

        async def counting() -> Message:
            nonlocal num_read, num_held
            message = await receive()
            limits = self._limits()
            num_read += len(message.get("body", b""))
            if max(num_read, announced) > limits.one:
                advice = "send less, or start the server with a larger --max-body-bytes"
                raise BodyTooLarge(f"the body is larger than {limits.one:,} bytes; {advice}")
            more = max(0, num_read - _FREE_BYTES) - num_held
            self._num_held, num_held = self._num_held + more, num_held + more
            if more and self._num_held > limits.total:
                advice = "try again in a moment, or start the server with a larger --max-total-body-bytes"
                raise TooManyBodies(f"the bodies of all requests together are larger than {limits.total:,} bytes; {advice}")
            return message

        try:
            await self._app(scope, counting, send)
        finally:
            self._num_held -= num_held


def _announced(scope: Scope) -> int:
    """The length of the body by its head, in bytes; 0 if the head does not say it."""
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(length[:20]) if length.isdigit() else 0
