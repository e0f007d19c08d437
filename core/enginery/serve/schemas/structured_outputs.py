"""Structured outputs: the one grammar that the fields of a body ask for."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from enginery.contracts.grammars import Grammar, GrammarKind
from enginery.errors import RequestError
from enginery.serve.schemas.completions import CommonRequest, ResponseFormat, StructuredOutputs


class FieldGrammar(msgspec.Struct, frozen=True):
    """A grammar, and the field of the body that asked for it."""

    field: str
    grammar: Grammar


def asked_grammar(asked: CommonRequest) -> FieldGrammar | None:
    """The grammar that the answer must follow, if any. Raises `RequestError` when more than one is asked for."""
    found = [one for one in _given(asked) if one.source is not None]
    if len(found) > 1:
        named = " and ".join(f"{one.field} ({one.kind})" for one in found)
        raise RequestError(f"an answer can follow one grammar, but {named} ask for one each", param=found[1].field)
    if asked.structured_outputs is not None and not any(one.field == "structured_outputs" for one in found):
        raise RequestError("structured_outputs says nothing; leave it out", param="structured_outputs")
    return field_grammar(*found[0]) if found else None


class _Given(NamedTuple):
    """What one field says about the answer. source: None if it says nothing."""

    field: str
    kind: GrammarKind
    source: object
    lenient: bool = False


def _given(asked: CommonRequest) -> list[_Given]:
    """What each field that may ask for a grammar says. Raises `RequestError` for a response format that contradicts itself."""
    format_, structured = asked.response_format or ResponseFormat(type="text"), asked.structured_outputs or StructuredOutputs()
    if (format_.type == "json_schema") != ((named := format_.json_schema) is not None):
        has = "has no" if named is None else "takes no"
        raise RequestError(f"response_format of the type {format_.type} {has} json_schema", param="response_format")
    return [
        _Given("response_format", GrammarKind.JSON_OBJECT, format_.type == "json_object" or None),
        _Given("response_format", GrammarKind.JSON_SCHEMA, named and named.schema, lenient=bool(named and named.strict is False)),
        _Given("structured_outputs", GrammarKind.JSON_OBJECT, structured.json_object or None),
        _Given("structured_outputs", GrammarKind.JSON_SCHEMA, structured.json),
        _Given("structured_outputs", GrammarKind.REGEX, structured.regex),
        _Given("structured_outputs", GrammarKind.CHOICE, structured.choice),
        _Given("structured_outputs", GrammarKind.GRAMMAR, structured.grammar),
        _Given("guided_json", GrammarKind.JSON_SCHEMA, asked.guided_json),
        _Given("guided_regex", GrammarKind.REGEX, asked.guided_regex),
        _Given("guided_choice", GrammarKind.CHOICE, asked.guided_choice),
        _Given("guided_grammar", GrammarKind.GRAMMAR, asked.guided_grammar),
    ]


def field_grammar(field: str, kind: GrammarKind, source: object, lenient: bool = False) -> FieldGrammar:
    """The grammar of one field of a body. Raises `RequestError` that names the field.

    source: its text, or a value whose JSON is the text; True for a kind of grammar that needs none.
    """
    text = "" if source is True else source if isinstance(source, str) else msgspec.json.encode(source).decode()
    try:
        return FieldGrammar(field, Grammar(kind=kind, source=text, lenient=lenient))
    except RequestError as error:
        raise RequestError(str(error), param=field) from error
