"""The grammar of a call's arguments in tags, where strings have no quotes and so no JSON schema can be applied to them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from enginery.api import RequestError, Tool
from enginery_parsers.lark import json_value, literal, pattern, up_to
from enginery_parsers.tagged import TaggedFormat, argument_types, json_of, resolved

ANY_KEY: Final = r'KEY: /[^<>"\n]{1,64}/'
_DEFINITIONS: Final = ("$defs", "definitions")
_NOTES: Final = {"title", "description", "default", "examples", "$comment", "deprecated"}
_OF_TOOL: Final = {"type", "properties", "required", "additionalProperties", "$schema", "$id", *_DEFINITIONS, *_NOTES}
_OF_TEXT: Final = {"type", "enum", "const", "minLength", "maxLength", *_NOTES}
_MIXABLE: Final = {"null", "boolean", "number"}  # with strings: what reads as one of these is one, and satisfies the bare type
_MAX_LENGTH: Final = 100_000


class TaggedArguments:
    """The grammars of arguments in one format."""

    def __init__(self, written: TaggedFormat) -> None:
        self._written = written
        self._break = r'"\n"' if written.breaks else ""
        self._end = literal("\n" * written.breaks + written.value_end)
        self.any_text = f"text[lazy]: {up_to(written.value_end)}"
        self.any = f'({literal(written.key)} KEY {self._between()} text "\\n"?)*'

    def _between(self) -> str:
        """From a key to its value."""
        if not self._written.value:
            return f"{literal(self._written.key_end)} {self._break}"
        return f'{literal(self._written.key_end)} "\\n"? {literal(self._written.value)} {self._break}'

    def rules(self, tool: Tool, index: int) -> tuple[str, list[str]]:
        """The arguments of the tool's call, in the schema's order, and rules with the tool's index in their names.

        Of a string's schema only `enum` is kept to, unless the tool is strict. Raises `RequestError` for a strict one whose schema
        cannot be kept to.
        """
        if tool.strict:
            check_tool(tool, self._written.family)
        listed = tool.parameters.get("required")
        required = listed if isinstance(listed, list) else []
        arguments, rules = [], []
        for place, (key, types) in enumerate(argument_types(tool.parameters).items()):
            rule = f"argument_{index}_{place}"
            if tool.strict:
                value, more = self._strict_value(tool, key, types, f"VALUE_{index}_{place}")
                rules += more
            else:
                value = self._value(tool, _property(tool, key), types)
            rules.append(f'{rule}: {literal(self._written.key + key)} {self._between()} {value} "\\n"?')
            arguments.append(rule if key in required else f"{rule}?")
        return " ".join(arguments), rules

    def _value(self, tool: Tool, schema: Any, types: frozenset[str]) -> str:
        whole = resolved(schema, tool.parameters)
        if types and "string" not in types:
            return f"{self._bare(tool, whole)} {self._end}"
        choices = whole.get("enum")
        if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            return f"({' | '.join(map(literal, choices))}) {self._end}"
        return "text"

    def _bare(self, tool: Tool, schema: Any) -> str:
        """A value that is no string."""
        if self._written.python_words and is_any_boolean(schema):
            return '("True" | "False" | "true" | "false")'
        return json_argument(tool, schema)

    def _strict_value(self, tool: Tool, key: str, types: frozenset[str], name: str) -> tuple[str, list[str]]:
        """name: of a terminal that may be needed."""
        schema, family = _property(tool, key), self._written.family
        alternatives = _alternatives(schema, tool.parameters)
        texts = [each for each in alternatives if _may_be_text(each)]
        if not texts:
            return f"{self._bare(tool, schema)} {self._end}", []
        bare = [each for each in alternatives if not _may_be_text(each)]
        text = texts[0]
        are_bare = all(isinstance(each.get("type"), str) and not each.keys() - {"type", *_NOTES} for each in bare)
        if len(texts) > 1 or not {"string"} <= types <= {"string", *_MIXABLE} or not are_bare:
            raise refusal(tool, family, f"of the alternatives of {key!r}")
        if odd := text.keys() - _OF_TEXT:
            raise refusal(tool, family, f"of {min(odd)!r} of the string {key!r}")
        sizes = [text.get("minLength", 0), text.get("maxLength", "")]
        if any(size != "" and not (type(size) is int and 0 <= size <= _MAX_LENGTH) for size in sizes):
            raise refusal(tool, family, f"of the length of {key!r}")
        choices = [text["const"]] if "const" in text else text.get("enum")
        if choices is None:
            if sizes == [0, ""]:
                return "text", []
            any_but_end = f"~/(?s:.*){pattern(self._written.value_end)}(?s:.*)/"
            return name, [rf"{name}: (/(?s:.{{{sizes[0]},{sizes[1]}}})/ & {any_but_end}) {self._end}"]
        if sizes != [0, ""] or not isinstance(choices, list) or not all(self._is_read_back(each, types) for each in choices):
            raise refusal(tool, family, f"of the values of {key!r}")
        written = [literal("null" if each is None else each) or '""' for each in choices]
        written += [json_value({"type": each["type"]}, exact=True) for each in bare]
        return f"({' | '.join(written)}) {self._end}", []

    def _is_read_back(self, choice: Any, types: frozenset[str]) -> bool:
        """Whether the parser reads the value that was written for it."""
        if choice is None:
            return "null" in types
        if not isinstance(choice, str):
            return False
        read = json_of(choice, types, python_words=self._written.python_words)
        return types == {"string"} or read == json.dumps(choice, ensure_ascii=False)


def check_tool(tool: Tool, family: str) -> None:
    """Refuse what no order of single arguments can satisfy."""
    parameters = tool.parameters
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if parameters.get("type", "object") != "object" or not isinstance(properties, Mapping) or not isinstance(required, list):
        raise refusal(tool, family, "they describe no object")
    if odd := parameters.keys() - _OF_TOOL:
        raise refusal(tool, family, f"of {min(odd)!r}")
    if missing := [key for key in required if not isinstance(key, str) or key not in properties]:
        raise refusal(tool, family, f"{missing[0]!r} is required and not among the properties")
    if odd := {key for key in properties if not key or key != key.strip() or "<" in key}:
        raise refusal(tool, family, f"of the name {min(odd)!r}")
    if odd := {ref for ref in _references(parameters) if not ref.startswith(tuple(f"#/{word}/" for word in _DEFINITIONS))}:
        raise refusal(tool, family, f"of the reference {min(odd)!r}")


def _property(tool: Tool, key: str) -> Any:
    """The schema of an argument that the tool states."""
    properties = tool.parameters["properties"]
    assert isinstance(properties, dict), "argument_types has looked"
    return properties[key]


def _alternatives(schema: Any, parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of one argument, without references; one that says more than its alternatives is one itself."""
    whole = resolved(schema, parameters)
    if isinstance(schema, Mapping) and "$ref" in schema and schema.keys() - {"$ref", *_NOTES}:
        return [schema]
    for word in ("anyOf", "oneOf"):
        if isinstance(parts := whole.get(word), list) and not whole.keys() - {word, *_NOTES}:
            return [resolved(part, parameters) for part in parts]
    return [whole]


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    kinds, values = schema.get("type"), [schema["const"]] if "const" in schema else schema.get("enum")
    if kinds is not None:
        return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
    return not isinstance(values, list) or any(isinstance(value, str) for value in values)


def is_any_boolean(schema: Any) -> bool:
    """Whether true and false are all that the schema allows."""
    return isinstance(schema, Mapping) and schema.get("type") == "boolean" and not schema.keys() - {"type", *_NOTES}


def json_argument(tool: Tool, schema: Mapping[str, Any]) -> str:
    """JSON of an argument's schema, which may refer to the tool's definitions."""
    definitions = {word: tool.parameters[word] for word in _DEFINITIONS if word in tool.parameters}
    return json_value({**definitions, **schema}, exact=tool.strict)


def _references(schema: Any) -> Iterator[str]:
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get("$ref"), str):
                yield part["$ref"]
            todo += part.values()
        elif isinstance(part, list):
            todo += part


def refusal(tool: Tool, family: str, why: str) -> RequestError:
    """The error for a strict tool that a family's format cannot keep to."""
    advice = "change them, or leave strict out"
    return RequestError(
        f"the parameters of {tool.name} cannot be kept to in {family}'s format, because {why}; {advice}", param="tools"
    )
