"""Forced outputs: the grammar accepts a call in the family's format, and what it accepts the parser reads as calls."""

from __future__ import annotations

import json
import random

import pytest

from enginery.api import ArgumentsText, Grammar, GrammarKind, ParserSetup, Tool, ToolCallBegun, ToolCallEnded
from enginery_parsers.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from enginery_parsers.spec import PARSERS

llguidance = pytest.importorskip("llguidance")

SPECS = {spec.name: spec for spec in PARSERS if spec.kind == "tools"}
UNIT = {"type": "string", "enum": ["C", "F"]}
WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}, "unit": {"$ref": "#/$defs/Unit"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"Unit": UNIT},
    },
)
TIME = Tool(name="get_time")
CLOSING = b'"}]</'
JSON = '{"city": "Oslo", "days": DAYS, "unit": "C"}'
ONE = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>',
    "llama3-json": f'{{"name": "get_weather", "parameters": {JSON}}}',
    "deepseek-v3": f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}get_weather\n```json\n{JSON}\n```{CALL_END}{CALLS_END}",
    "deepseek-v3.1": f"{CALLS_BEGIN}{CALL_BEGIN}get_weather{SEPARATOR}{JSON}{CALL_END}{CALLS_END}",
    "glm4": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>DAYS</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n</tool_call>"
    ),
}


def matcher(grammar: Grammar | None) -> llguidance.LLMatcher:
    assert grammar is not None
    assert grammar.kind is GrammarKind.GRAMMAR
    found = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(grammar.source))
    assert not found.get_error()
    return found


def accepts(grammar: Grammar | None, text: str) -> bool:
    found, tokens = matcher(grammar), list(text.encode())
    return found.try_consume_tokens(tokens) == len(tokens) and found.is_accepting()


def calls(name: str, text: str) -> list[tuple[str, object]]:
    parser = SPECS[name].make(ParserSetup(tools=(WEATHER, TIME), new_id=lambda: "call_0"))
    names, arguments = [], {}
    for event in [*parser.feed(text), *parser.finish()]:
        match event:
            case ToolCallBegun(name=called):
                names.append(called)
            case ArgumentsText(index, part):
                arguments[index] = arguments.get(index, "") + part
            case ToolCallEnded(complete=complete):
                assert complete
            case other:
                raise AssertionError(f"{other} is no part of a call")
    return [(called, json.loads(arguments[index])) for index, called in enumerate(names)]


@pytest.mark.parametrize("name", SPECS)
def test_a_call_in_the_familys_format_is_accepted_and_read(name: str) -> None:
    text = ONE[name].replace("DAYS", "3")
    assert accepts(SPECS[name].force((WEATHER, TIME), None, parallel=True), text)
    assert calls(name, text) == [("get_weather", {"city": "Oslo", "days": 3, "unit": "C"})]


@pytest.mark.parametrize("name", SPECS)
def test_other_text_and_arguments_against_the_schema_are_refused(name: str) -> None:
    grammar = SPECS[name].force((WEATHER, TIME), None, parallel=True)
    assert not accepts(grammar, "It is warm in Oslo.")
    assert not accepts(grammar, "")
    assert not accepts(grammar, ONE[name].replace("DAYS", "3.5"))
    assert not accepts(grammar, ONE[name].replace("DAYS", "3").replace('"C"', '"K"').replace(">C<", ">K<"))


@pytest.mark.parametrize("name", SPECS)
def test_a_named_function_is_the_only_one(name: str) -> None:
    text = ONE[name].replace("DAYS", "3")
    assert accepts(SPECS[name].force((WEATHER, TIME), "get_weather", parallel=True), text)
    assert not accepts(SPECS[name].force((WEATHER, TIME), "get_time", parallel=True), text)
    assert SPECS[name].force((WEATHER, TIME), "fly", parallel=True) is None


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("parallel", [True, False])
def test_what_the_grammar_allows_is_read_as_calls(name: str, *, parallel: bool) -> None:
    shapes = set()
    for seed in range(30):
        found, random_, text = matcher(SPECS[name].force((WEATHER, TIME), None, parallel=parallel)), random.Random(seed), b""
        while not found.is_stopped() and len(text) < 1_500:
            mask = found.compute_logit_bias()
            allowed = [token for token in range(256) if mask[token]]
            plain = [token for token in allowed if token < 127] or allowed
            if found.is_accepting() and (not allowed or random_.random() < 0.5):
                break
            token = random_.choice([option for option in plain if option in CLOSING] * 5 + plain)
            assert found.consume_token(token)
            text += bytes([token])
        if found.is_accepting():
            read = calls(name, text.decode())
            assert read
            assert parallel or len(read) == 1
            shapes.add(len(read))
    assert shapes
