"""The HTTP application: routes, and errors in OpenAI's shape. `server` runs it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from enginery import __version__
from enginery.errors import EnginError, RequestError
from enginery.plugin.boundary import exits_as_failures
from enginery.plugin.loading import explain
from enginery.plugin.near import did_you_mean
from enginery.plugin.records import PluginRecord
from enginery.serve.api.anthropic import PATHS as ANTHROPIC_PATHS
from enginery.serve.api.anthropic import anthropic_error, count_tokens, create_message
from enginery.serve.api.chat import chat
from enginery.serve.api.completions import complete
from enginery.serve.api.embeddings import EmbeddingsRequest, embed
from enginery.serve.api.operator_routes import operations
from enginery.serve.api.responses import count_input_tokens, respond
from enginery.serve.api.service import Service, json_answer
from enginery.serve.api.tokenize import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from enginery.serve.http.body_limits import BodyBounds
from enginery.serve.http.caller import NoteCaller
from enginery.serve.http.event_stream import ClientGone
from enginery.serve.http.faults import Fault, ShuttingDown
from enginery.serve.schemas.anthropic import CountTokensRequest, MessagesRequest
from enginery.serve.schemas.chat import ChatRequest
from enginery.serve.schemas.completions import CompletionRequest
from enginery.serve.schemas.described_replies import ModelCard, ModelList
from enginery.serve.schemas.openapi import add_schemas
from enginery.serve.schemas.responses import InputTokensRequest, ResponsesRequest

Handler = Callable[[Service, Request], Awaitable[Response]]

ENDPOINTS: Final[Mapping[str, tuple[Handler, type[msgspec.Struct]]]] = {
    "/v1/completions": (complete, CompletionRequest),
    "/v1/chat/completions": (chat, ChatRequest),
    "/v1/responses": (respond, ResponsesRequest),
    "/v1/responses/input_tokens": (count_input_tokens, InputTokensRequest),
    "/v1/messages": (create_message, MessagesRequest),
    "/v1/messages/count_tokens": (count_tokens, CountTokensRequest),
    "/v1/embeddings": (embed, EmbeddingsRequest),
    "/tokenize": (tokenize, TokenizeRequest),
    "/detokenize": (detokenize, DetokenizeRequest),
}  # what takes a body, and the body
_log = logging.getLogger(__name__)


class _App(FastAPI):
    """FastAPI, with the bodies and answers of this server in its OpenAPI document."""

    def openapi(self) -> dict[str, object]:
        """The document of /openapi.json, which is made when it is first asked for."""
        if self.openapi_schema is None:
            add_schemas(super().openapi(), {path: body for path, (_, body) in ENDPOINTS.items()})
        return super().openapi()


class _StaysUp:
    """An application in which a plugin's route that exits fails, and the server does not end."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with exits_as_failures():
            await self.app(scope, receive, send)


def owners_of(added: Iterable[tuple[PluginRecord, APIRouter]]) -> Mapping[object, str]:
    """The plugin that each endpoint of a plugin's routes is from, for messages."""
    return {route.endpoint: str(record) for record, routes in added for route in routes.routes if isinstance(route, Route)}


def build_app(service: Service, *, plugin_routes: APIRouter | None = None, owners: Mapping[object, str] | None = None) -> FastAPI:
    """The application over a service.

    plugin_routes: added last, so that they replace nothing. owners: the plugins that their endpoints are from, see `owners_of`;
    what an endpoint of these raises is the plugin's fault, and said to be.
    """
    app = _App(title="Enginery", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    app.add_middleware(BodyBounds, limits=lambda: service.body_limits)
    app.add_middleware(NoteCaller)
    app.add_middleware(_StaysUp)
    started_s = int(time.time())

    for path, (handler, _) in ENDPOINTS.items():
        app.post(path, name=handler.__name__)(_endpoint(service, handler))

    @app.get("/tokenizer_info")  # for clients that render and count by themselves
    async def about_tokenizer() -> Response:
        text = service.model().text
        return json_answer({**text.tokenizer.named, "chat_template": text.template.source})

    @app.get("/v1/models")
    async def models() -> Response:
        cards = [_card(service, name, started_s) for name in service.model().names]
        return json_answer(ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))

    @app.get("/v1/models/{model:path}")
    async def model_card(model: str) -> Response:
        return json_answer(_card(service, service.model().check_name(model), started_s))

    app.include_router(operations(service))
    if plugin_routes is not None:
        app.include_router(plugin_routes)
    _add_error_handlers(app, owners or {})
    return app


def _card(service: Service, name: str, started_s: int) -> ModelCard:
    facts, when = service.model().facts, datetime.fromtimestamp(started_s, UTC)
    size = facts.max_model_len
    return ModelCard(
        id=name, display_name=name, created=started_s, created_at=when, root=facts.folder, max_model_len=size, max_input_tokens=size
    )


def _endpoint(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(service, request)
        except asyncio.CancelledError as ended:  # by uvicorn, as the server stops and no answer has begun
            raise ShuttingDown from ended

    return endpoint


def _answer(request: Request, fault: Fault) -> Response:
    """The answer to an error, in the shape of the API that was asked."""
    if request.url.path.startswith(ANTHROPIC_PATHS):
        return JSONResponse(anthropic_error(fault), status_code=fault.status, headers=dict(fault.headers))
    return fault.response()


def _add_error_handlers(app: FastAPI, owners: Mapping[object, str]) -> None:
    @app.exception_handler(EnginError)
    async def known(request: Request, error: EnginError) -> Response:
        return _answer(request, Fault.of(error))

    @app.exception_handler(ClientGone)
    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        headers = error.headers or {}
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        message, path = str(error.detail), request.url.path[:200]
        if error.status_code == 404:
            message = f"there is no path {path} here{did_you_mean(path, app.openapi()['paths'])}"
        elif error.status_code == 405:
            message = f"{path} does not answer {request.method[:16]}; it answers {headers.get('Allow')}"
        return _answer(request, Fault(status=error.status_code, message=message, type=kind, headers=headers))

    @app.exception_handler(RequestValidationError)
    async def wrong_query(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return _answer(request, Fault.of(RequestError(f"{name} of the URL's query: {first['msg']}", param=name)))

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        owner = owners.get(request.scope.get("endpoint"))
        whose = "" if owner is None else f" in a route of {owner}: {explain(error)}"
        _log.error("%s %s failed%s", request.method, request.url.path, whose, exc_info=error)
        message = f"{type(error).__name__}, a bug of {owner or 'the server'}; the log has the traceback"
        return _answer(request, Fault(status=500, message=message, type="server_error"))
