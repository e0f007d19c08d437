"""The HTTP application: routes, and errors in OpenAI's shape. `server` runs it."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from enginery import __version__
from enginery.errors import EnginError
from enginery.serve.chat import chat
from enginery.serve.completions import complete
from enginery.serve.engine_client import EngineState
from enginery.serve.faults import Fault
from enginery.serve.schemas import ChatRequest, CompletionRequest
from enginery.serve.service import Service
from enginery.serve.stream import ClientGone

_log = logging.getLogger(__name__)


def build_app(service: Service, *, plugin_routes: APIRouter | None = None) -> FastAPI:
    """The application over a service. plugin_routes: added last, so that they replace nothing."""
    app = FastAPI(title="Enginery", version=__version__, docs_url=None, redoc_url=None)
    started_s = int(time.time())

    @app.post("/v1/completions", openapi_extra=_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await complete(service, request)

    @app.post("/v1/chat/completions", openapi_extra=_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        return await chat(service, request)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_card(service, started_s)]})

    @app.get("/v1/models/{model:path}")
    async def model_card(model: str) -> Response:
        service.model().check_name(model)
        return JSONResponse(_card(service, started_s))

    @app.get("/health")
    async def health() -> Response:
        """200 only when requests are served."""
        return JSONResponse({"status": service.state}, status_code=200 if service.state is EngineState.READY else 503)

    if plugin_routes is not None:
        app.include_router(plugin_routes)
    _add_error_handlers(app)
    return app


def _card(service: Service, started_s: int) -> dict[str, Any]:
    facts = service.model().facts
    card = {"id": facts.model_name, "object": "model", "created": started_s, "owned_by": "enginery"}
    return {**card, "root": facts.folder, "parent": None, "max_model_len": facts.max_model_len}


def _body(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The body's schema, for /openapi.json."""
    schema = msgspec.json.schema(kind)
    definitions = schema.get("$defs", {})
    inlined = _inline(definitions[kind.__name__], definitions)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined}}}}


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    return {key: _inline(value, definitions) for key, value in schema.items()}


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(EnginError)
    async def known(request: Request, error: EnginError) -> Response:
        return Fault.of(error).response()

    @app.exception_handler(ClientGone)
    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        headers = error.headers or {}
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return Fault(status=error.status_code, message=str(error.detail), type=kind, headers=headers).response()

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        message = f"{type(error).__name__}, a bug of the server; its log has the traceback"
        return Fault(status=500, message=message, type="server_error").response()
