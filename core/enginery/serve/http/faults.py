"""Errors as HTTP answers, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
from starlette.responses import Response

from enginery.errors import EngineDied, EnginError, Overloaded, QueueFull, RequestError
from enginery.text.template import TemplateStuck

_MAX_CHARS: Final = 4000  # of a message, which may quote what a client sent
_RETRY: Final[Mapping[str, str]] = {"Retry-After": "1"}


class GenerationFailed(EnginError):
    """The engine gave up on one request, by no fault of its sender."""


class NotReady(EnginError):
    """The engine is still loading the model."""


class EngineBusy(EnginError):
    """The engine did not get to an order in time."""


class EngineRestarts(EngineDied):
    """The engine ended, and is started again."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the engine is started again, so try again in a moment; it ended: {why}")


class ShuttingDown(EnginError):
    """The server was told to stop."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down; send the request again when it is back")


class Aborted(EnginError):
    """An administrator ended the request."""

    def __init__(self) -> None:
        super().__init__("the request was aborted by an administrator")


class Unauthorized(RequestError):
    """The request has no key, or one that is not known."""

    def __init__(self, needed: str = "this server needs a key that it knows") -> None:
        super().__init__(f"{needed}: send Authorization: Bearer KEY")


class NoSuchModel(RequestError):
    """The request names a model that is not served here."""


class ContextExceeded(RequestError):
    """The prompt, or it and the tokens that are asked for, do not fit into the context: agents then shorten their conversation."""


class BodyTooLarge(RequestError):
    """A body has more bytes than are accepted of one request."""


class TooManyBodies(EnginError):
    """All bodies together have more bytes than are accepted."""


class _Shape(NamedTuple):
    """How one kind of error is answered. names_field: whether the error's `param` is told."""

    status: int
    code: str | None = None
    headers: Mapping[str, str] = {}
    names_field: bool = False


_SHAPES: Final[Mapping[type[EnginError], _Shape]] = {  # the first that fits counts, so kinds stand before their parents
    QueueFull: _Shape(429, "queue_full", _RETRY),
    Overloaded: _Shape(503, "overloaded", _RETRY, names_field=True),
    NoSuchModel: _Shape(404, "model_not_found", names_field=True),
    Unauthorized: _Shape(401, "invalid_api_key", {"WWW-Authenticate": "Bearer"}),
    BodyTooLarge: _Shape(413, "body_too_large"),
    ContextExceeded: _Shape(400, "context_length_exceeded", names_field=True),
    RequestError: _Shape(400, names_field=True),
    TooManyBodies: _Shape(503, "too_many_bodies", _RETRY),
    NotReady: _Shape(503, "loading", _RETRY),
    EngineBusy: _Shape(503, "busy", _RETRY),
    ShuttingDown: _Shape(503, "shutting_down", _RETRY),
    TemplateStuck: _Shape(503, "template_stuck", _RETRY),
    EngineRestarts: _Shape(503, "engine_restarting", _RETRY),
    EngineDied: _Shape(503, "engine_died"),
    EnginError: _Shape(500),
}
_TYPES: Final = {429: "rate_limit_error", 503: "unavailable_error", 500: "server_error"}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An error as its sender sees it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: EnginError) -> Fault:
        """The answer to an error, with the status and the words that OpenAI's clients know."""
        shape = next(shape for kind, shape in _SHAPES.items() if isinstance(error, kind))
        message = str(error)[:_MAX_CHARS]
        if isinstance(error, EngineDied):
            message = message.split("\n", maxsplit=1)[0]
        param = error.param if isinstance(error, RequestError) and shape.names_field else None
        kind = _TYPES.get(shape.status, "invalid_request_error")
        return cls(status=shape.status, message=message, type=kind, param=param, code=shape.code, headers=shape.headers)

    def body(self) -> bytes:
        """The error as JSON, in OpenAI's shape."""
        return msgspec.json.encode({"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}})

    def response(self) -> Response:
        """The whole answer, with status and headers."""
        return Response(self.body(), status_code=self.status, headers=dict(self.headers), media_type="application/json")
