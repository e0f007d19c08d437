"""The schemas in /openapi.json: for each path those of its body, and of its answers by their statuses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import GenericAlias
from typing import Any, Final, NamedTuple

import msgspec

from enginery.serve.api.anthropic import PATHS as ANTHROPIC_PATHS
from enginery.serve.http.keys import PUBLIC
from enginery.serve.schemas import described_replies as told
from enginery.serve.schemas.replies import ChatReply, CompletionReply, JsonObject

_WHY: Final = {
    200: "Done.",
    400: "Something is wrong with the request; `param` names the field.",
    401: "The server has keys, and none of them was sent.",
    404: "No such model or path.",
    413: "The body is too large.",
    429: "The queue is full; try again after `Retry-After` seconds.",
    500: "A bug of the server or of a plugin.",
    503: "The model is loading, the server stops, or the engine has died.",
}
_OF_BODIES: Final = (400, 404, 413, 429, 500, 503)
_TEXT: Final[JsonObject] = {"schema": {"type": "string"}}
_ANYTHING: Final = {"title": "any JSON"}


class _Answers(NamedTuple):
    """What one path answers. ok: the body of a 200, None for text. faults: the other statuses, without 401.

    streams: whether there are events, if asked for. fault: the body of a 503 that is no error.
    """

    ok: type | GenericAlias | None
    faults: tuple[int, ...] = (500,)
    streams: bool = False
    fault: type | None = None


def _of_body(ok: type, *, streams: bool = False) -> _Answers:
    return _Answers(ok=ok, faults=_OF_BODIES, streams=streams)


ANSWERS: Final[Mapping[str, _Answers]] = {
    "/v1/completions": _of_body(CompletionReply, streams=True),
    "/v1/chat/completions": _of_body(ChatReply, streams=True),
    "/v1/responses": _of_body(told.ResponseReply, streams=True),
    "/v1/responses/input_tokens": _of_body(told.CountedInput),
    "/v1/messages": _of_body(told.MessageReply, streams=True),
    "/v1/messages/count_tokens": _of_body(told.CountedPrompt),
    "/v1/embeddings": _of_body(told.EmbeddingsReply),
    "/tokenize": _of_body(told.Tokens),
    "/detokenize": _of_body(told.DetokenizedText),
    "/tokenizer_info": _Answers(ok=told.TokenizerInfo, faults=(500, 503)),
    "/v1/models": _Answers(ok=told.ModelList, faults=(500, 503)),
    "/v1/models/{model}": _Answers(ok=told.ModelCard, faults=(404, 500, 503)),
    "/health": _Answers(ok=told.Status, faults=(500, 503), fault=told.Status),
    "/health/live": _Answers(ok=told.Status),
    "/health/ready": _Answers(ok=told.Status, faults=(500, 503), fault=told.Status),
    "/health/progress": _Answers(ok=told.Progress, faults=(500, 503), fault=told.Progress),
    "/metrics": _Answers(ok=None),
    "/server_info": _Answers(ok=GenericAlias(dict, (str, object))),
    "/admin/flush_prefix_cache": _Answers(ok=told.Told, faults=(500, 503)),
    "/admin/profile": _Answers(ok=told.Told, faults=(400, 500, 503)),
    "/admin/abort": _Answers(ok=told.Told, faults=(400, 500, 503)),
}


def add_schemas(document: dict[str, Any], bodies: Mapping[str, type[msgspec.Struct]]) -> None:
    """Describe the bodies and answers of this server's paths in an OpenAPI document, which is changed and has FastAPI's type.

    Paths of plugins stay as they are, but for the error of a wrong query, which is 400 here. bodies: by path.
    """
    found = (kind for answers in ANSWERS.values() for kind in (answers.ok, answers.fault) if kind is not None)
    kinds: list[object] = [told.OpenAIError, told.AnthropicError, *bodies.values(), *found]
    schemas, components = json_schemas(kinds)
    document.setdefault("components", {})["schemas"] = components
    refs = dict(zip(kinds, schemas, strict=True))
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if path in bodies:
                content = {"application/json": {"schema": refs[bodies[path]]}}
                operation["requestBody"] = {"required": True, "content": content}
            if path in ANSWERS:
                operation["responses"] = dict(_responses(path, ANSWERS[path], refs))


def _responses(path: str, answers: _Answers, refs: Mapping[object, JsonObject]) -> Iterator[tuple[str, JsonObject]]:
    """The responses of one path by status. Keys are asked for in OpenAI's shape on every path."""
    error = told.AnthropicError if path.startswith(ANTHROPIC_PATHS) else told.OpenAIError
    content: JsonObject = {"text/plain": _TEXT} if answers.ok is None else {"application/json": {"schema": refs[answers.ok]}}
    if answers.streams:
        content["text/event-stream"] = _TEXT
    yield "200", {"description": _WHY[200], "content": content}
    for status in sorted({*answers.faults, *([] if path in PUBLIC else [401])}):
        kind = told.OpenAIError if status == 401 else (status == 503 and answers.fault) or error
        yield str(status), {"description": _WHY[status], "content": {"application/json": {"schema": refs[kind]}}}


def json_schemas(kinds: Iterable[object]) -> tuple[list[JsonObject], JsonObject]:
    """The schemas of types, and by their names those of the structs in them.

    `object` stands for any JSON. msgspec takes no empty schema for it, so a mark is put there and removed again.
    """
    refs = "#/components/schemas/{name}"
    schemas, components = msgspec.json.schema_components(kinds, schema_hook=lambda _: dict(_ANYTHING), ref_template=refs)
    _drop_marks([*schemas, components])
    return list(schemas), components


def _drop_marks(schema: object) -> None:
    if isinstance(schema, dict):
        for key in [key for key, value in schema.items() if value == _ANYTHING]:
            del schema[key]
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _drop_marks(inner)
