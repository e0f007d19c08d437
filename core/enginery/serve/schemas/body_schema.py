"""The JSON schemas of bodies and answers, for /openapi.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from enginery.serve.schemas.replies import JsonObject

_ANYTHING: Final = {"title": "any JSON"}


def body_schema(kind: type[msgspec.Struct]) -> JsonObject:
    """What an operation of an OpenAPI document has that takes `kind` as its body."""
    _, definitions = json_schemas([kind])
    inlined = _inline(definitions[kind.__name__], definitions)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined}}}}


def json_schemas(kinds: Iterable[object], *, refs: str = "#/$defs/{name}") -> tuple[list[JsonObject], JsonObject]:
    """The schemas of types, and by their names those of the structs in them. refs: how a schema refers to such a name.

    `object` stands for any JSON. msgspec takes no empty schema for it, so a mark is put there and removed again.
    """
    schemas, components = msgspec.json.schema_components(kinds, schema_hook=lambda _: dict(_ANYTHING), ref_template=refs)
    _drop_marks([*schemas, components])
    return list(schemas), components


def _drop_marks(schema: object) -> None:
    if isinstance(schema, dict):
        for key in [key for key, value in schema.items() if value == _ANYTHING]:
            del schema[key]
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _drop_marks(inner)


def _inline(schema: object, definitions: Mapping[str, object]) -> object:
    """The schema with its references replaced by what they refer to, and so without discriminators, which refer too."""
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    return {key: _inline(value, definitions) for key, value in schema.items() if key != "discriminator"}
