"""Grammars of calls to strict tools, where values have no quotes: they satisfy the schema, or it is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from call_grammars import SPECS, UNIT, accepts, compiler_of, free, gathered, validator

from enginery.api import ParserSetup, RequestError, Tool, UnfinishedGrammar

TAGGED_VALUES = [
    ({"type": "string"}, ["", "5", "null", "a\nb", '"q"'], []),
    ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "日本語x", "<<"], ["a", "abcde", ""]),
    ({"type": "string", "enum": ["a", "5", "null", ""]}, ["a", "5", "null", ""], ["b", '"a"']),
    ({"type": "string", "const": "only"}, ["only"], ["other"]),
    ({"type": ["string", "null"]}, ["a", "null", "5"], []),
    ({"type": ["string", "null"], "enum": ["a", None]}, ["a", "null"], ["b"]),
    ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "T"}, ["a", "null"], []),
    ({"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "boolean"}]}, ["a", "true"], ["b", "1"]),
    ({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]}, ["C", "null"], ["K"]),
    ({"$ref": "#/$defs/Tree"}, ['{"of": [{"of": []}]}'], ['{"of": [1]}', "x"]),
    ({"type": "array", "items": {"$ref": "#/$defs/Unit"}}, ['["C", "F"]'], ['["K"]']),
    ({"enum": [1, 2, True]}, ["1", "true"], ["3", '"1"']),
    ({"type": "number", "minimum": 3}, ["3.5"], ["2", "x"]),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["7", "null"], ["7.5", "x"]),
]
TREE = {"type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}}, "required": ["of"]}
VALUE_OF = {  # the text of a call whose argument v is VALUE
    "glm4": "<tool_call>f\n<arg_key>v</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    "qwen3-xml": "<tool_call>\n<function=f>\n<parameter=v>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    "mimo": "<tool_call>\n<function=f>\n<parameter=v>VALUE</parameter>\n</function>\n</tool_call>",
    "minimax-m2": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="v">VALUE</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
}


@pytest.mark.parametrize("name", VALUE_OF)
@pytest.mark.parametrize(("schema", "good", "bad"), TAGGED_VALUES)
def test_values_without_quotes_satisfy_the_schema_of_a_strict_tool(
    name: str, schema: dict, good: list[str], bad: list[str]
) -> None:
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"], "$defs": {"Unit": UNIT, "Tree": TREE}}
    tool = Tool(name="f", parameters=parameters, strict=True)
    for value, is_good in [*((value, True) for value in good), *((value, False) for value in bad)]:
        text = VALUE_OF[name].replace("VALUE", value)
        assert accepts(free(name, tool), text) is is_good, value
        if is_good:
            assert one_call(name, tool, text)


def one_call(name: str, tool: Tool, text: str) -> dict[str, Any]:
    """The arguments of the only call, which satisfy the schema."""
    parser = SPECS[name].make(ParserSetup(tools=(tool,), new_id=lambda: "call_0"))
    _, [(_, arguments)] = gathered([*parser.feed(text), *parser.finish()])
    validator(json.dumps(tool.parameters)).validate(arguments)
    return arguments


@pytest.mark.parametrize("strict", [True, False])
def test_the_words_of_python_are_allowed_where_the_template_writes_them(*, strict: bool) -> None:
    tool = Tool(name="f", parameters={"properties": {"v": {"type": "boolean"}}, "required": ["v"]}, strict=strict)
    texts = {**VALUE_OF, "lfm2": "<|tool_call_start|>[f(v=VALUE)]<|tool_call_end|>"}
    for name, text in texts.items():
        grammar = SPECS[name].force((tool,), None, parallel=True, required=True)
        is_python = name in ("qwen3-xml", "mimo", "lfm2")
        assert accepts(grammar, text.replace("VALUE", "True")) is is_python, name
        assert accepts(grammar, text.replace("VALUE", "true")), name
        assert not accepts(grammar, text.replace("VALUE", "Yes")), name
        assert one_call(name, tool, text.replace("VALUE", "True" if is_python else "true")) == {"v": True}


@pytest.mark.parametrize(
    ("given", "is_good"),
    [
        ("", False),
        ("a=1", True),
        ('a=1, b="x"', True),
        ('a=1, c=[{"d": "()\\""}]', True),
        ('a=1, b="x", c=[]', True),
        ("a=1, ", False),
        ('b="x"', False),
        ('b="x", a=1', False),
        ('a=1, b="xyz"', False),
        ("a=1.5", False),
        ("a=1, d=2", False),
        ("a=1 b=2", False),
    ],
)
def test_arguments_of_python_satisfy_the_schema_of_a_strict_tool(given: str, *, is_good: bool) -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 2}, "c": {"type": "array"}}
    tool = Tool(name="f", parameters={"type": "object", "properties": properties, "required": ["a"]}, strict=True)
    text = f"<|tool_call_start|>[f({given})]<|tool_call_end|>"
    assert accepts(free("lfm2", tool), text) is is_good
    if is_good:
        assert one_call("lfm2", tool, text)["a"] == 1


def test_a_name_that_python_cannot_write_is_refused() -> None:
    tool = Tool(name="f", parameters={"properties": {"a-b": {"type": "integer"}}}, strict=True)
    with pytest.raises(RequestError, match="cannot be kept to in LFM2's format, because of the name 'a-b'"):
        free("lfm2", tool)


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"v": {"type": "string", "pattern": "^a$"}}},
        {"properties": {"v": {"type": "string", "format": "date"}}},
        {"properties": {"v": {"type": "string", "minLength": -1}}},
        {"properties": {"v": {"type": ["string", "integer"]}}},
        {"properties": {"v": {"type": ["string", "number"], "enum": ["5"]}}},
        {"properties": {"v": {"anyOf": [{"type": "string"}, {"type": "number", "minimum": 3}]}}},
        {"properties": {"v": {"allOf": [{"type": "string"}]}}},
        {"properties": {"v": {"$ref": "#/$defs/A", "maxLength": 2}}, "$defs": {"A": {"type": "string"}}},
        {"properties": {"v": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}]}}},
        {"properties": {"v": {"type": "array", "items": {"$ref": "#"}}}},
        {"properties": {"v": {}}},
        {"properties": {"v": True}},
        {"properties": {"v": {"type": "string", "enum": [[]]}}},
        {"properties": {" v": {"type": "string"}}},
        {"properties": {"<v": {"type": "string"}}},
        {"properties": {}, "required": ["v"]},
        {"properties": {}, "required": [[]]},
        {"properties": []},
        {"type": "array"},
        {"anyOf": [{"required": ["v"]}]},
    ],
    ids=str,
)
def test_a_strict_tool_that_glms_format_cannot_keep_to_is_refused(parameters: dict) -> None:
    with pytest.raises(RequestError, match="f cannot be kept to in GLM's format") as refused:
        free("glm4", Tool(name="f", parameters=parameters, strict=True))
    assert refused.value.param == "tools"
    assert free("glm4", Tool(name="f", parameters=parameters))


@pytest.fixture(scope="module")
def compiler() -> Any:
    return compiler_of()


def nested(depth: int) -> dict:
    found: dict = {"type": "string"}
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found


HOSTILE = {
    "deep": {"properties": {"v": nested(2_000)}},
    "no object": {"type": "array"},
    "half a character": {"properties": {"\ud800": {"type": "integer"}}},
    "long": {"properties": {"v": {"enum": ["x" * 1_000] * 300}}},
    "a keyword that is not supported": {"properties": {"v": {"type": "array", "uniqueItems": True}}},
    "a type that is none": {"properties": {"v": {"type": {}}}},
    "an unknown type": {"properties": {"v": {"type": "banana"}}},
    "never": {"properties": {"v": {"type": "integer", "minimum": 3, "maximum": 2}}, "required": ["v"]},
    "hidden by x-guidance": {"properties": {"v": {"not": {}}}, "x-guidance": {"lenient": True}},
    "a line of Lark": {"properties": {'v"\nstart: "x': {"type": "integer", "not": {}}}},
}


def compile_strictly(compiler: Any, name: str, parameters: dict) -> None:
    """To the end, on a busy machine too."""
    found = compiler.compile(free(name, Tool(name="f", parameters=parameters, strict=True)))
    if isinstance(found, UnfinishedGrammar):
        found.finish()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("about", HOSTILE)
def test_hostile_schemas_of_strict_tools_are_refused(name: str, about: str, compiler: Any) -> None:
    with pytest.raises(RequestError) as refused:
        compile_strictly(compiler, name, HOSTILE[about])
    assert len(str(refused.value)) < 1_500
