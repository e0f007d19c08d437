"""Tools, grammars of calls to them, and calls read back as the server does."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from enginery.api import (
    ArgumentsText,
    ContentText,
    Grammar,
    GrammarKind,
    GrammarTokens,
    ParserSetup,
    Tool,
    ToolCallBegun,
    ToolCallEnded,
)
from enginery_parsers.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from enginery_parsers.spec import PARSERS

llguidance = pytest.importorskip("llguidance")

REASONING = next(spec for spec in PARSERS if spec.name == "qwen3")
SPECS = {spec.name: spec for spec in PARSERS if spec.kind == "tools" and spec.name != "harmony"}  # which needs special tokens
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
GLM_CALL = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>DAYS</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n</tool_call>"
)
QWEN_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\nDAYS\n</parameter>\n"
    "<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>"
)
MINIMAX_CALL = (
    '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
    '<parameter name="days">DAYS</parameter>\n<parameter name="unit">C</parameter>\n</invoke>\n</minimax:tool_call>'
)
KIMI_CALL = "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
OBJECT = f'{{"name": "get_weather", "arguments": {JSON}}}'
ONE = {
    "hermes": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "longcat": f"<longcat_tool_call>\n{OBJECT}\n</longcat_tool_call>",
    "granite3": f"<|tool_call|>[{OBJECT}]",
    "phi4-mini": f"<|tool_call|>[{OBJECT}]<|/tool_call|>",
    "nemotron": f"<TOOLCALL>[{OBJECT}]</TOOLCALL>",
    "jamba": f"<tool_calls>[\n    {OBJECT}\n]</tool_calls>",
    "minimax-m1": f"<tool_calls>\n{OBJECT}\n</tool_calls>",
    "llama3-json": f'{{"name": "get_weather", "parameters": {JSON}}}',
    "mistral": f"[TOOL_CALLS][{OBJECT}]",
    "mistral-args": f"[TOOL_CALLS]get_weather[ARGS]{JSON}",
    "deepseek-v3": f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}get_weather\n```json\n{JSON}\n```{CALL_END}{CALLS_END}",
    "deepseek-v3.1": f"{CALLS_BEGIN}{CALL_BEGIN}get_weather{SEPARATOR}{JSON}{CALL_END}{CALLS_END}",
    "kimi-k2": f"<|tool_calls_section_begin|>{KIMI_CALL}{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "minimax-text": f"<function_call>```typescript\nfunctions.get_weather({JSON})\n```",
    "glm4": GLM_CALL,
    "longcat-tags": GLM_CALL.replace("tool_call>", "longcat_tool_call>").replace("arg_", "longcat_arg_"),
    "qwen3-xml": QWEN_CALL,
    "mimo": QWEN_CALL.replace(">\nOslo\n<", ">Oslo<").replace(">\nDAYS\n<", ">DAYS<").replace(">\nC\n<", ">C<"),
    "minimax-m2": MINIMAX_CALL,
    "lfm2": '<|tool_call_start|>[get_weather(city="Oslo", days=DAYS, unit="C")]<|tool_call_end|>',
}


def matcher(grammar: Grammar | None) -> llguidance.LLMatcher:
    assert grammar is not None
    assert grammar.kind is GrammarKind.GRAMMAR
    return compiled_once(grammar.source).deep_copy()


@functools.cache
def compiled_once(source: str) -> llguidance.LLMatcher:
    """Of a grammar in Lark."""
    found = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(source))
    assert not found.get_error()
    return found


@functools.cache
def validator(schema: str) -> jsonschema.Draft202012Validator:
    """The schema itself is checked once."""
    jsonschema.Draft202012Validator.check_schema(json.loads(schema))
    return jsonschema.Draft202012Validator(json.loads(schema))


def accepts(grammar: Grammar | None, text: str) -> bool:
    found, tokens = matcher(grammar), list(text.encode())
    return found.try_consume_tokens(tokens) == len(tokens) and found.is_accepting()


def gathered(events: list[Any]) -> tuple[str, list[tuple[str, Any]]]:
    """The content, and the calls, all of them complete."""
    content, names, arguments = "", [], {}
    for event in events:
        match event:
            case ContentText(text):
                content += text
            case ToolCallBegun(name=called):
                names.append(called)
            case ArgumentsText(index, part):
                arguments[index] = arguments.get(index, "") + part
            case ToolCallEnded(complete=complete):
                assert complete
    return content, [(called, json.loads(arguments[index])) for index, called in enumerate(names)]


STRICT = Tool(name=WEATHER.name, parameters=WEATHER.parameters, strict=True)


def free(name: str, *tools: Tool, parallel: bool = True, reasoning: tuple[str, str] = ("", "")) -> Grammar | None:
    return SPECS[name].force(tools or (STRICT, TIME), None, parallel=parallel, required=False, reasoning=reasoning)


def read_freely(name: str, text: str, *, reasons: bool = False, inside: bool = False) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls, read as the server does; the calls are checked against the tools."""
    setup = ParserSetup(tools=(STRICT, TIME), new_id=lambda: "call_0", inside=inside)
    events: list[Any] = [ContentText(text)]
    if reasons:
        first = REASONING.make(setup)
        events = [*first.feed(text), *first.finish()]
    parser, found = SPECS[name].make(setup), []
    for event in events:
        found += parser.feed(event.text) if isinstance(event, ContentText) else [event]
    content, read = gathered([*found, *parser.finish()])
    for called, arguments in read:
        validator(json.dumps(STRICT.parameters if called == STRICT.name else {"type": "object"})).validate(arguments)
    return content, read


def compiler_of(words: Sequence[str] = ()) -> Any:
    """For a vocabulary of an end, every byte, and these."""
    found = pytest.importorskip("enginery_grammar_llguidance.compiler")
    texts = (b"<end>", *(bytes([byte]) for byte in range(256)), *(word.encode() for word in words))
    ends = frozenset({0})
    return found.Compiler(
        GrammarTokens(tokens=texts, special_ids=ends, eos_token_ids=ends, encode=lambda text: [1 + byte for byte in text.encode()])
    )
