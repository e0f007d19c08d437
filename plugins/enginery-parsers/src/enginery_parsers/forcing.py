"""Grammars of the families' own formats, for requests that must call a tool. They are Lark in llguidance's dialect.

Arguments satisfy the tool's schema, and are spaced as in the models' templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from enginery.api import ForceFn, Grammar, GrammarKind, Tool
from enginery_parsers.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from enginery_parsers.glm import argument_types, resolved

_SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_DEFINITIONS: Final = ("$defs", "definitions")
_GLM_TEXT: Final = r"text[lazy]: /(?s:.*)<\/arg_value>/"


class ForceJson:
    """Calls whose arguments are JSON.

    around: the texts before a call's name, between name and arguments, and after. between: calls. ends: before and after all.
    """

    def __init__(self, *around: str, between: str = "", ends: tuple[str, str] = ("", "")) -> None:
        self._before, self._middle, self._after = around
        self._between = between
        self._ends = ends

    def __call__(self, tools: Sequence[Tool], name: str | None, *, parallel: bool) -> Grammar | None:
        """See `ForceFn`."""
        calls, rules = [], []
        for index, tool in enumerate(_wanted(tools, name)):
            calls.append(f"{_text(self._before + tool.name + self._middle)} arguments_{index} {_text(self._after)}")
            rules.append(f"arguments_{index}: {_json({'type': 'object', **tool.parameters})}")
        more = f" ({_text(self._between)} call)*" if parallel and name is None else ""
        return _grammar(f"{_text(self._ends[0])} call{more} {_text(self._ends[1])}", calls, rules)


def force_glm(tools: Sequence[Tool], name: str | None, *, parallel: bool) -> Grammar | None:
    """See `ForceFn`. Of a string's schema only `enum` is kept to: the format has no JSON there."""
    calls, rules = [], [_GLM_TEXT]
    for index, tool in enumerate(_wanted(tools, name)):
        listed = tool.parameters.get("required")
        required = listed if isinstance(listed, list) else []
        arguments = []
        for place, (key, types) in enumerate(argument_types(tool.parameters).items()):
            rule = f"argument_{index}_{place}"
            value = _glm_value(resolved(tool.parameters["properties"][key], tool.parameters), types, tool.parameters)
            rules.append(f'{rule}: {_text(f"<arg_key>{key}</arg_key>")} "\\n"? "<arg_value>" {value} "\\n"?')
            arguments.append(rule if key in required else f"{rule}?")
        calls.append(f'{_text(f"<tool_call>{tool.name}")} "\\n"? {" ".join(arguments)} "</tool_call>"')
    return _grammar('"\\n"? call ("\\n"? call)*' if parallel and name is None else '"\\n"? call', calls, rules)


def _glm_value(schema: Mapping[str, Any], types: frozenset[str], parameters: Mapping[str, Any]) -> str:
    if types and "string" not in types:
        return f'{_json({**{word: parameters[word] for word in _DEFINITIONS if word in parameters}, **schema})} "</arg_value>"'
    choices = schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f'({" | ".join(map(_text, choices))}) "</arg_value>"'
    return "text"


def _wanted(tools: Sequence[Tool], name: str | None) -> list[Tool]:
    return [tool for tool in tools if name in (None, tool.name)]


def _grammar(start: str, calls: Sequence[str], rules: Sequence[str]) -> Grammar | None:
    if not calls:
        return None
    lines = [f"start: {start}", f"call: {' | '.join(f'call_{index}' for index in range(len(calls)))}"]
    lines += [f"call_{index}: {call}" for index, call in enumerate(calls)]
    return Grammar(kind=GrammarKind.GRAMMAR, source="\n".join([*lines, *rules]) + "\n")


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACING})}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


FORCED_BY: Final[Mapping[str, ForceFn]] = {
    "hermes": ForceJson('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n"),
    "llama3-json": ForceJson('{"name": "', '", "parameters": ', "}", between="; "),
    "deepseek-v3": ForceJson(
        f"{CALL_BEGIN}function{SEPARATOR}", "\n```json\n", f"\n```{CALL_END}", between="\n", ends=(CALLS_BEGIN, CALLS_END)
    ),
    "deepseek-v3.1": ForceJson(CALL_BEGIN, SEPARATOR, CALL_END, ends=(CALLS_BEGIN, CALLS_END)),
    "glm4": force_glm,
}
