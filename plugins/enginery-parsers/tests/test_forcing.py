"""Grammars of calls: they accept a call in the family's format, and what they accept the parser reads as calls that are valid.

Where no call is required, all other text is accepted too.
"""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import EVERYTHING, in_turn

from enginery.api import (
    ArgumentsText,
    ContentText,
    Grammar,
    GrammarKind,
    GrammarTokens,
    ParserSetup,
    RequestError,
    Tool,
    ToolCallBegun,
    ToolCallEnded,
    UnfinishedGrammar,
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
    "nemotron": f"<TOOLCALL>[{OBJECT}]</TOOLCALL>",
    "jamba": f"<tool_calls>[\n    {OBJECT}\n]</tool_calls>",
    "minimax-m1": f"<tool_calls>\n{OBJECT}\n</tool_calls>",
    "llama3-json": f'{{"name": "get_weather", "parameters": {JSON}}}',
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


def calls(name: str, text: str) -> list[tuple[str, object]]:
    parser = SPECS[name].make(ParserSetup(tools=(WEATHER, TIME), new_id=lambda: "call_0"))
    content, read = gathered([*parser.feed(text), *parser.finish()])
    assert not content
    return read


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


@pytest.mark.parametrize("name", SPECS)
def test_a_call_in_the_familys_format_is_accepted_and_read(name: str) -> None:
    text = ONE[name].replace("DAYS", "3")
    assert accepts(SPECS[name].force((WEATHER, TIME), None, parallel=True, required=True), text)
    assert calls(name, text) == [("get_weather", {"city": "Oslo", "days": 3, "unit": "C"})]


@pytest.mark.parametrize("name", SPECS)
def test_other_text_and_arguments_against_the_schema_are_refused(name: str) -> None:
    grammar = SPECS[name].force((WEATHER, TIME), None, parallel=True, required=True)
    assert not accepts(grammar, "It is warm in Oslo.")
    assert not accepts(grammar, "")
    assert not accepts(grammar, ONE[name].replace("DAYS", "3.5"))
    assert not accepts(
        grammar, ONE[name].replace("DAYS", "3").replace('"C"', '"K"').replace(">C<", ">K<").replace("\nC\n", "\nK\n")
    )


@pytest.mark.parametrize("name", SPECS)
def test_a_named_function_is_the_only_one(name: str) -> None:
    text = ONE[name].replace("DAYS", "3")
    assert accepts(SPECS[name].force((WEATHER, TIME), "get_weather", parallel=True, required=True), text)
    assert not accepts(SPECS[name].force((WEATHER, TIME), "get_time", parallel=True, required=True), text)
    assert SPECS[name].force((WEATHER, TIME), "fly", parallel=True, required=True) is None


@in_turn(("name", SPECS), ("parallel", [True, False]))
def test_what_the_grammar_allows_is_read_as_calls(name: str, *, parallel: bool) -> None:
    shapes = set()
    for seed in range(30 if EVERYTHING else 12):
        found, random_, text = (
            matcher(SPECS[name].force((WEATHER, TIME), None, parallel=parallel, required=True)),
            random.Random(seed),
            b"",
        )
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


STRICT = Tool(name=WEATHER.name, parameters=WEATHER.parameters, strict=True)
TAGS = ("<think>", "</think>")
PROSE = [
    "",
    "It is warm in Oslo.",
    "a < b, <tool_",
    '{"a": 1}',
    'so:\n{\n  "city": "Oslo"\n}',
    "日本語 \U0001f600\n\n```json\n[]\n```",
    "<\uff5ctool",
]


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


@pytest.mark.parametrize("name", SPECS)
def test_text_without_a_call_is_free_where_none_is_required(name: str) -> None:
    for text in PROSE:
        assert accepts(free(name), text), text
        assert accepts(free(name, parallel=False), text), text
        assert read_freely(name, text) == (text, [])


@pytest.mark.parametrize("name", SPECS)
def test_a_call_in_the_midst_of_text_follows_its_schema(name: str) -> None:
    before, after = ("", "") if name == "llama3-json" else ("I look. ", " Done.")
    for days, is_valid in (("3", True), ("3.5", False), ('"x"', False)):
        text = before + ONE[name].replace("DAYS", days) + after
        assert accepts(free(name), text) is is_valid, text
    unknown = before + ONE[name].replace("get_weather", "get_money").replace("DAYS", "3")
    assert not accepts(free(name), unknown)


@pytest.mark.parametrize("name", SPECS)
def test_arguments_of_a_tool_that_is_not_strict_are_any_object(name: str) -> None:
    anything = json.dumps({"a": [1, {"b": None}], "city": 5})
    text = ONE[name].replace(JSON, anything).replace("DAYS", '"soon"')
    for before, after in (("arg_key>", "<"), ("=", ">"), ('="', '"'), ("(", "=")):
        text = text.replace(f"{before}city{after}", f"{before}other{after}")
    assert accepts(free(name, WEATHER), text)
    assert not accepts(free(name, STRICT), text)


@pytest.mark.parametrize("name", SPECS)
def test_one_call_at_most_where_they_are_not_parallel(name: str) -> None:
    text = ONE[name].replace("DAYS", "3")
    more = text + ("; " if name == "llama3-json" else "\n") + text
    assert accepts(free(name, parallel=False), text)
    assert accepts(free(name), more)
    assert not accepts(free(name, parallel=False), more)


@pytest.mark.parametrize("name", SPECS)
def test_reasoning_is_free_even_if_it_speaks_of_calls(name: str) -> None:
    call, wrong = (ONE[name].replace("DAYS", days) for days in ("3", "no"))
    for tags, opening in ((TAGS, "\n<think>"), (("", TAGS[1]), "")):
        grammar = free(name, reasoning=tags)
        for text in ("hm", f"{wrong} hm", f"hm</think>\n\n{call}", f"{wrong}</think>It is warm."):
            assert accepts(grammar, opening + text), opening + text
        assert not accepts(grammar, f"{opening}hm</think>{wrong}")
    assert not accepts(free(name, reasoning=TAGS), wrong)
    assert not accepts(free(name, reasoning=TAGS), f"x<think></think>\n{wrong}")
    assert not accepts(free(name, reasoning=TAGS), f"{' ' * 17}<think>\n{wrong}"), "so far from the beginning it is content"


BAD = '{"city": 5}'
OBJECTS = [
    f'{{"name": "get_weather", "arguments": {BAD}}}',
    f'{{"parameters": {BAD}, "name": "get_weather"}}',
    f'{{ "id": 1, "name":"get_weather", "arguments": {BAD}}}',
    f'{{"type": "function", "name": "get_weather", "parameters": {BAD}}}',
    f'{{"\\u006eame": "get_weather", "arguments": {BAD}}}',
]
PAIR = "<arg_key>days</arg_key><arg_value>x</arg_value>"
QWEN_PAIR = "<parameter=days>x</parameter>"
MINIMAX_PAIR = '<parameter name="days">x</parameter>'
AGAINST = {  # calls that the parsers read, whose arguments are wrong
    "hermes": [f"<tool_call>{blank}{call}</tool_call>" for blank in ("", "\n", " ") for call in OBJECTS],
    "llama3-json": [begin + call for begin in ("", "\n", " ", "<|python_tag|>", "<|python_tag|> ") for call in OBJECTS],
    "deepseek-v3": [
        f"{CALL_BEGIN}function{SEPARATOR}get_weather{fence}{BAD}" for fence in ("\n```json\n", "\n```\n", "\n", "```json")
    ],
    "deepseek-v3.1": [f"{CALL_BEGIN}{name}{SEPARATOR}{BAD}" for name in ("get_weather", " get_weather ", "get_weather\n")],
    "glm4": [f"<tool_call>{begin}{PAIR}</tool_call>" for begin in ("get_weather", "get_weather\n", "\n get_weather ")],
    "longcat": [f"<longcat_tool_call>{blank}{call}</longcat_tool_call>" for blank in ("", "\n", " ") for call in OBJECTS],
    "nemotron": [f"<TOOLCALL>{begin}{call}" for begin in ("[", "", " [ ", '[{"name": "get_time"}, ') for call in OBJECTS],
    "jamba": [f"<tool_calls>{begin}{call}" for begin in ("[", "[\n    ", "", "\n") for call in OBJECTS],
    "minimax-m1": [f"<tool_calls>{begin}{call}" for begin in ("[", "\n", "", " ") for call in OBJECTS],
    "kimi-k2": [
        f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{BAD}"
        for head in ("functions.get_weather:0", "get_weather", " functions.get_weather:12 ", "get_weather:3\n")
    ],
    "minimax-text": [
        f"<function_call>{begin}get_weather({BAD})"
        for begin in ("```typescript\nfunctions.", "", "\n```functions.", "```ts functions.")
    ],
    "longcat-tags": [
        f"<longcat_tool_call>{begin}{PAIR.replace('arg_', 'longcat_arg_')}</longcat_tool_call>"
        for begin in ("get_weather", "get_weather\n", "\n get_weather ")
    ],
    "qwen3-xml": [
        f"{begin}<function=get_weather>{QWEN_PAIR}</function>" for begin in ("<tool_call>", "<tool_call>\n", "<tool_call> ", "")
    ],
    "mimo": [f"{begin}<function=get_weather>\n{QWEN_PAIR}</function>" for begin in ("<tool_call>", "<tool_call>\n", "")],
    "minimax-m2": [
        f'{begin}<invoke name="get_weather">{MINIMAX_PAIR}</invoke>'
        for begin in ("<minimax:tool_call>", "<minimax:tool_call>\n", '<minimax:tool_call><invoke name="get_time"></invoke>', "")
    ],
    "lfm2": [
        *(
            f"<|tool_call_start|>{begin}get_weather({given})"
            for begin in ("[", "", "[get_time(), ")
            for given in ("city=5", "days='x'")
        ),
        *(f"<|tool_call_start|>{begin}{call}" for begin in ("[", "") for call in OBJECTS),
    ],
}
BEGINS = {  # of a call, as the grammars write it
    "hermes": ["<tool_call>"],
    "longcat": ["<longcat_tool_call>"],
    "nemotron": ["<TOOLCALL>"],
    "jamba": ["<tool_calls>"],
    "minimax-m1": ["<tool_calls>"],
    "llama3-json": ['{"name": "'],
    "kimi-k2": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    "minimax-text": ["<function_call>"],
    "glm4": ["<tool_call>"],
    "longcat-tags": ["<longcat_tool_call>"],
    "qwen3-xml": ["<tool_call>", "<function="],
    "mimo": ["<tool_call>", "<function="],
    "minimax-m2": ["<minimax:tool_call>", '<invoke name="'],
    "lfm2": ["<|tool_call_start|>"],
}
PARTS = [
    *("<tool_call>", "</tool_call>", '{"name": "', "get_weather", '", "arguments": ', "{}", "}", JSON.replace("DAYS", "3")),
    *(CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END, "function", "\n```json\n", "<|python_tag|>", "<think>", "</think>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "city", "\n", " ", " " * 15, "; ", "{", '"', "x"),
]


@in_turn(("name", SPECS), ("tags", [("", ""), TAGS, ("", TAGS[1])]))
@given(st.data())
@settings(deadline=None, max_examples=80 if EVERYTHING else 32)
def test_no_text_that_is_accepted_has_a_call_against_its_schema(name: str, tags: tuple[str, str], data: st.DataObject) -> None:
    call = ONE[name].replace("DAYS", "3")
    around = st.lists(st.sampled_from([*PARTS, *BEGINS.get(name, [CALLS_BEGIN]), call, "<think>"]), max_size=4).map("".join)
    text = data.draw(around) + data.draw(st.sampled_from(AGAINST[name])) + data.draw(around)
    found, tokens = matcher(free(name, reasoning=tags)), list(text.encode())
    taken = tokens[: found.try_consume_tokens(tokens)]
    if found.is_accepting():
        read_freely(name, bytes(taken).decode(errors="ignore"), reasons=bool(tags[1]), inside=tags == ("", TAGS[1]))


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in AGAINST.items() for text in texts])
def test_a_call_against_its_schema_is_not_accepted_wherever_the_parser_reads_it(name: str, text: str) -> None:
    call = ONE[name].replace("DAYS", "3")
    num_read = 0
    for before in (
        "",
        "x",
        "x\n",
        "\n",
        " ",
        "x <tool_",
        f"{call}\n",
        f"{call}; ",
        f"{call} and\n",
        CALLS_BEGIN,
        f"x{CALLS_BEGIN}",
    ):
        try:
            read_freely(name, before + text)
        except jsonschema.ValidationError:
            num_read += 1
            assert not accepts(free(name), before + text), before + text
    assert num_read > 2


WORDS = [
    *PARTS[:15],
    *PARTS[19:27],
    "l>\n{",
    '{"',
    '"}',
    '"}}\n',
    "}\n</",
    " it",
    " the call",
    '": ',
    "Oslo",
    "ool_c",
    "</think>\n\n",
    *("<TOOLCALL>", "]</TOOLCALL>", "<longcat_", "</longcat_", "arg_value>", "tool_call>", "tool_calls>", "<|tool_", "_begin|>"),
    *(
        "_end|>",
        "</parameter>",
        "</function>",
        "</invoke>",
        "</minimax:tool_call>",
        "<parameter",
        "functions.",
        "```",
        ")\n",
        ")]<|",
    ),
]
ENDING = (
    *(
        '"',
        "}",
        '"}',
        "]",
        "</",
        CALL_END,
        CALLS_END,
        "</arg_value>",
        "</tool_call>",
        ")",
        "]</TOOLCALL>",
        "</longcat_",
        "arg_value>",
    ),
    *("tool_call>", "tool_calls>", "</parameter>", "</function>", "</invoke>", "</minimax:tool_call>", "_end|>", ")]<|"),
)


@pytest.fixture(scope="module")
def compiler() -> Any:
    """For a vocabulary of an end, every byte, and tokens within, at and across the markers."""
    found = pytest.importorskip("enginery_grammar_llguidance.compiler")
    texts = (b"<end>", *(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS))
    ends = frozenset({0})
    return found.Compiler(
        GrammarTokens(tokens=texts, special_ids=ends, eos_token_ids=ends, encode=lambda text: [1 + byte for byte in text.encode()])
    )


def walk(state: Any, texts: list[bytes], seed: int, begins: list[str]) -> bytes | None:
    """Tokens at random under the masks, leaning to end what is open, and at times to begin a call. None: too long."""
    rng, written, wish = random.Random(seed), b"", b""
    for _ in range(1_500):
        row = np.zeros(-(-len(texts) // 32), dtype=np.int32)
        state.fill_mask(row)
        allowed = np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        ending = [token for token in allowed if texts[token].decode(errors="ignore") in ENDING]
        wish = wish or (rng.choice(begins).encode() if rng.random() < (0.05 if written else 0.3) else b"")
        wished = [token for token in allowed if token and wish.startswith(texts[token])] if wish else []
        plain = [token for token in allowed if 32 <= token <= 127 or token > 257] or allowed
        token = rng.choice(wished or [*ending * (1 + len(plain) // (1 + len(ending))), *plain])
        if 0 in allowed and rng.random() < 0.05:
            token = 0
        assert state.accept(token)
        if token == 0:
            return written
        written += texts[token]
        wish = wish[len(texts[token]) :] if wished else b""
    return None


@pytest.mark.parametrize("name", SPECS)
def test_walks_under_the_masks_write_free_text_and_valid_calls(name: str, compiler: Any) -> None:
    begins = BEGINS.get(name, [CALLS_BEGIN, CALL_BEGIN])
    found = compiler.compile(free(name))
    compiled = found.finish() if isinstance(found, UnfinishedGrammar) else found
    texts = [b"", *(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS)]
    shapes = []
    for seed in range(60 if EVERYTHING else 30):
        written = walk(compiled.start(), texts, seed, begins)
        if written is not None:
            content, read = read_freely(name, written.decode())
            shapes.append((bool(content), len(read)))
    assert (True, 0) in shapes, "text alone"
    assert sum(num for _, num in shapes) > 5, "calls"
    assert name == "llama3-json" or any(has_text and num for has_text, num in shapes), "both"


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
