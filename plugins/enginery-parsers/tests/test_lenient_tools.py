"""Forced calls of tools that are not strict keep to what a grammar can say of their schemas; the rest is left to the model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from call_grammars import SPECS, compiler_of
from test_strict_tools import VALUE_OF

from enginery.api import Grammar, GrammarKind, RequestError, Tool, UnfinishedGrammar

JSON_OF = VALUE_OF | {"hermes": '<tool_call>\n{"name": "f", "arguments": {"v": VALUE}}\n</tool_call>'}
JSON_OF |= {"lfm2": "<|tool_call_start|>[f(v=VALUE)]<|tool_call_end|>"}
BEYOND = [  # what Zod, Pydantic and servers of MCP write: the schema, a value, and one that breaks what a grammar knows
    (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        '{"a": 1}',
        '{"a": "x"}',
    ),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "contains": {"const": 1}}, "[1, 2]", '["x"]'),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "dependentRequired": {"a": ["b"]}}, '{"a": 1}', '{"a": "x"}'),
    ({"type": "integer", "not": {"const": 3}}, "4", '"x"'),
    ({"oneOf": [{"type": "integer", "minimum": 2}, {"type": "number"}]}, "4", '"x"'),
    ({"type": "array", "items": {"type": "string", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+$"}}, '["a.b"]', "[3]"),
    ({"type": "array", "items": {"type": "string", "format": "regex"}}, '["a.b"]', "[3]"),
    ({"type": "object", "patternProperties": {"^(?=a)": {"type": "string"}, "^b": {"type": "integer"}}}, '{"b": 1}', '{"b": "x"}'),
    ({"type": "array", "items": {"$ref": "https://example.com/of.json"}, "minItems": 1}, '["a"]', "[]"),
    ({"type": "array", "items": {"enum": [{"pattern": "(?=a)", "$ref": "b"}]}}, '[{"pattern": "(?=a)", "$ref": "b"}]', "[{}]"),
]


@pytest.fixture(scope="module")
def compiler() -> Any:
    return compiler_of()


def tool(schema: dict, *, strict: bool = False) -> Tool:
    return Tool(name="f", parameters={"type": "object", "properties": {"v": schema}, "required": ["v"]}, strict=strict)


def takes(compiler: Any, name: str, called: Tool, text: str) -> bool:
    return follows(compiler, SPECS[name].force((called,), None, parallel=False, required=True), text)


def follows(compiler: Any, grammar: Grammar, text: str) -> bool:
    found = compiler.compile(grammar)
    state = (found.finish() if isinstance(found, UnfinishedGrammar) else found).start()
    return all(state.accept(1 + byte) for byte in text.encode())


@pytest.mark.parametrize("name", JSON_OF)
@pytest.mark.parametrize(("schema", "good", "bad"), BEYOND)
def test_what_a_grammar_cannot_say_is_left_to_the_model(name: str, schema: dict, good: str, bad: str, compiler: Any) -> None:
    assert takes(compiler, name, tool(schema), JSON_OF[name].replace("VALUE", good))
    assert not takes(compiler, name, tool(schema), JSON_OF[name].replace("VALUE", bad))


@pytest.mark.parametrize("name", SPECS)
def test_a_strict_tool_is_kept_to_or_refused(name: str, compiler: Any) -> None:
    for schema, good, _ in BEYOND[:-1]:
        with pytest.raises(RequestError):
            takes(compiler, name, tool(schema, strict=True), JSON_OF.get(name, "VALUE").replace("VALUE", good))


@pytest.mark.parametrize(("schema", "good", "bad"), BEYOND[:-1])
@pytest.mark.parametrize("beside_tools", [False, True])
def test_so_it_is_of_an_answer_that_need_not_be_strict(
    schema: dict, good: str, bad: str, compiler: Any, *, beside_tools: bool
) -> None:
    source = json.dumps({"type": "object", "properties": {"v": schema}, "required": ["v"]})

    def takes_answer(text: str, *, lenient: bool) -> bool:
        answer = Grammar(kind=GrammarKind.JSON_SCHEMA, source=source, lenient=lenient)
        force = SPECS["hermes"].force_or_json(answer)
        return follows(compiler, force((tool({}),), None, parallel=False, required=False) if beside_tools else answer, text)

    assert takes_answer(f'{{"v": {good}}}', lenient=True)
    assert not takes_answer(f'{{"v": {bad}}}', lenient=True)
    with pytest.raises(RequestError):
        takes_answer(f'{{"v": {good}}}', lenient=False)
