"""Parts of Lark grammars, in llguidance's dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from enginery.api import RequestError

_SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_ANSWER_SPACING: Final = {"whitespace_pattern": r"[ ]|\n[ ]{0,40}"}  # on one line or indented, but no spaces without end


def literal(text: str) -> str:
    """A text as a Lark literal; empty for an empty text, which Lark has no literal for."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def json_value(schema: Mapping[str, Any], *, exact: bool) -> str:
    """JSON text that satisfies a schema, spaced as in the models' templates; if not exact, what the compiler knows of the schema.

    Raises `RequestError`.
    """
    try:
        return f"%json {json.dumps({**schema, 'x-guidance': {**_SPACING, 'lenient': not exact}})}"
    except RecursionError as error:
        raise RequestError("the parameters of a tool are nested too deeply", param="tools") from error


def json_answer(schema: str, *, lenient: bool) -> str:
    """JSON text that satisfies a schema, or what the compiler knows of it, spaced as models like. schema: JSON text. Raises
    `RequestError`."""
    try:
        read = json.loads(schema)
        if not isinstance(read, dict):
            raise RequestError("the JSON schema of the answer is no JSON object", param="grammar")
        return f"%json {json.dumps({**read, 'x-guidance': {**_ANSWER_SPACING, 'lenient': lenient}})}"
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema of the answer cannot be read: {str(error)[:200]}", param="grammar") from error


def pattern(text: str) -> str:
    """A text as part of a regular expression that matches only this text."""
    return re.escape(text).replace("/", r"\/")


def up_to(marker: str) -> str:
    """Any text that ends with the marker, for a lazy lexeme."""
    return f"/(?s:.*){pattern(marker)}/"
