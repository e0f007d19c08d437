"""Golden streams: each format's outputs give the events written beside them, however the text is cut."""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import EVERYTHING

from enginery.api import (
    ArgumentsText,
    ContentText,
    ParserEvent,
    ParserSetup,
    ParserSpec,
    ReasoningText,
    Tool,
    ToolCallBegun,
    ToolCallEnded,
)
from enginery_parsers.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from enginery_parsers.spec import PARSERS

STREAMS = Path(__file__).with_name("streams")
SPECS = {spec.name: spec for spec in PARSERS}
REASONING = [spec.name for spec in PARSERS if spec.kind == "reasoning"]
# Formats that differ from another one in the names of their markers: where its cases are, and what to replace in them.
ALIKE = {
    "longcat": ("hermes", r"(?<=<)(/?)(?=tool_)", r"\1longcat_"),
    "longcat-tags": ("glm4", r"(?<=<)(/?)(?=tool_|arg_)", r"\1longcat_"),
    "phi4-mini": ("hermes", r"<(/?)(tool_ca(?:ll)?)(>?)", lambda match: f"<|{match[1]}{match[2]}{'|>' * bool(match[3])}"),
    "nemotron": ("hermes", r"(?<=<)(/?)tool_(ca(?:ll)?)", lambda match: f"{match[1]}TOOL{match[2].upper()}"),
    "jamba": ("hermes", r"tool_call>", "tool_calls>"),
    "minimax-m1": ("nemotron", r"TOOLCALL>", "tool_calls>"),
    "mistral": ("mistral-args", r"$^", ""),  # one parser reads both
    "longcat-think": ("reasoning", r"(?<=<)(/?)(?=thi)", r"\1longcat_"),
    "magistral": ("reasoning", r"<(/?)(thi(?:nk)?)(>?)", lambda match: f"[{match[1]}{match[2].upper()}{']' * bool(match[3])}"),
}
TOOLS = (
    Tool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    ),
    Tool(name="get_time", parameters={"type": "object", "properties": {"zone": {"enum": ["UTC"]}}}),
    Tool(
        name="find",
        parameters={
            "type": "object",
            "properties": {
                "where": {},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "sorted": {"type": "boolean"},
                "unit": {"$ref": "#/$defs/Unit"},
            },
            "$defs": {"Unit": {"enum": ["7", "8"], "type": "string"}},
        },
    ),
)


def golden() -> list[Any]:
    """Each case of each format."""
    return [pytest.param(name, case, id=f"{name}: {case['about']}") for name in SPECS for case in cases_of(name)]


def cases_of(name: str) -> list[dict[str, Any]]:
    """From the format's own file, and from that of a format that is alike."""
    own = STREAMS / f"{name}.toml"
    cases = tomllib.loads(own.read_text())["case"] if own.exists() else []
    if name in ALIKE:
        like, pattern, names = ALIKE[name]
        cases += [renamed(case, pattern, names) for case in tomllib.loads((STREAMS / f"{like}.toml").read_text())["case"]]
    elif name in REASONING and not own.exists():
        cases = tomllib.loads((STREAMS / "reasoning.toml").read_text())["case"]
    assert cases
    return cases


def renamed(case: dict[str, Any], pattern: str, names: Any) -> dict[str, Any]:
    """The case in the other format's markers."""
    lines = [[kind, *(re.sub(pattern, names, text) for text in texts)] for kind, *texts in case["events"]]
    return {**case, "text": re.sub(pattern, names, case["text"]), "events": lines}


def spelt_out(lines: Iterable[Sequence[str]], ids: Sequence[str] = ()) -> list[ParserEvent]:
    """The events that a case's lines stand for: `call` is a complete one, `cut` an incomplete one. ids: of the calls."""
    events: list[ParserEvent] = []
    numbers = count()
    for kind, text, *rest in lines:
        if kind in ("content", "reasoning"):
            events.append(ContentText(text) if kind == "content" else ReasoningText(text))
            continue
        index = next(numbers)
        events.append(ToolCallBegun(index, ids[index] if ids else f"call_{index:02x}", text))
        events += [ArgumentsText(index, arguments) for arguments in rest]
        events.append(ToolCallEnded(index, kind == "call"))
    return events


def parsed(spec: ParserSpec, pieces: Iterable[str], *, inside: bool = False) -> list[ParserEvent]:
    """The events, with neighbouring texts joined."""
    numbers = count()
    parser = spec.make(ParserSetup(tools=TOOLS, new_id=lambda: f"call_{next(numbers):02x}", inside=inside))
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


def joined(events: Iterable[ParserEvent]) -> list[ParserEvent]:
    """Neighbouring texts of one kind as one."""
    result: list[ParserEvent] = []
    for event in events:
        match (result[-1:], event):
            case [ContentText(before)], ContentText(text):
                result[-1] = ContentText(before + text)
            case [ReasoningText(before)], ReasoningText(text):
                result[-1] = ReasoningText(before + text)
            case [ArgumentsText(_, before)], ArgumentsText(index, text):
                result[-1] = ArgumentsText(index, before + text)
            case _:
                result.append(event)
    return result


def cut_at_random(text: str, seed: int) -> list[str]:
    """Pieces of 0 to 9 characters."""
    pieces, start, random_ = [], 0, random.Random(seed)
    while start < len(text):
        end = start + random_.randrange(10)
        pieces.append(text[start:end])
        start = end
    return pieces


@pytest.mark.parametrize(("name", "case"), golden())
def test_a_stream_gives_its_events_however_it_is_cut(name: str, case: dict[str, Any]) -> None:
    spec, text, inside = SPECS[name], case["text"], case.get("inside", False)
    expected = spelt_out(case["events"], case.get("ids", ()))
    assert parsed(spec, [text], inside=inside) == expected
    assert parsed(spec, text, inside=inside) == expected
    for place in range(len(text)):
        assert parsed(spec, [text[:place], text[place:]], inside=inside) == expected
    for seed in range(10):
        assert parsed(spec, cut_at_random(text, seed), inside=inside) == expected


@pytest.mark.parametrize(("name", "case"), golden())
def test_arguments_of_complete_calls_are_json_objects(name: str, case: dict[str, Any]) -> None:
    events = parsed(SPECS[name], case["text"])
    complete = {event.index for event in events if isinstance(event, ToolCallEnded) and event.complete}
    found = [event.text for event in events if isinstance(event, ArgumentsText) and event.index in complete]
    assert all(isinstance(json.loads(text), dict) for text in found)
    assert len(found) == len(complete)


PARTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<|python_tag|>",
        CALLS_BEGIN,
        CALL_BEGIN,
        SEPARATOR,
        CALL_END,
        CALLS_END,
    ),
    *(
        "function",
        "get_weather",
        "get_time",
        "fly",
        "```json",
        "```",
        "\n",
        "\n\n",
        " ",
        "x",
        "<",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        ";",
    ),
    *(
        '"',
        "\\",
        "\\u00e9",
        "1",
        "-",
        "1.5",
        "true",
        "{}",
        '{"name": "get_time", "arguments": ',
        '{"name": "get_time"',
        '"city": "a"',
    ),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "days", "é🙂"),
]
# Of each further format: its markers and the parts of a call.
PARTS_OF = {
    "qwen3-xml": [
        "<function=get_weather>",
        "<function=get_time>",
        "<parameter=city>",
        "<parameter=days>",
        "</parameter>",
        "</function>",
    ],
    "minimax-m2": [
        *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="get_weather">', '<invoke name="get_time">', "</invoke>"),
        *('<parameter name="city">', '<parameter name="days">', "</parameter>"),
    ],
    "kimi-k2": [
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        *("functions.get_time:0", "functions.fly:1", "<|tool_call_argument_begin|>"),
    ],
    "minimax-text": ["<function_call>", "```typescript\nfunctions.", "functions.", "get_time(", ")\n", "```"],
    "granite3": ["<|tool_call|>", "<|tool_call|>[", '{"name": "get_time"}', "]", "}}, "],
    "phi4-mini": ["<|tool_call|>[", "<|tool_call|>", "]<|/tool_call|>", "<|/tool_call|>", '{"name": "get_time"}', "}}, "],
    "nemotron": ["<TOOLCALL>[", "<TOOLCALL>", "]</TOOLCALL>", "</TOOLCALL>", '{"name": "get_time"}', "}}, "],
    "jamba": ["<tool_calls>[", "<tool_calls>", "]</tool_calls>", "</tool_calls>", '{"name": "get_time"}', "}}, "],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][", '{"name": "get_time"}', "]", "}}, ", '"id": "abc123def"'],
    "mistral-args": ["[TOOL_CALLS]", "[TOOL_CALLS]get_time", "[ARGS]", "[ARGS]{}", "[CALL_ID]abc123def"],
    "longcat": ["<longcat_tool_call>", "</longcat_tool_call>"],
    "longcat-tags": [
        *("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>"),
        "</longcat_arg_value>",
    ],
    "longcat-think": ["<longcat_think>", "</longcat_think>"],
    "magistral": ["[THINK]", "[/THINK]"],
    "lfm2": [
        *(
            "<|tool_call_start|>[",
            "<|tool_call_start|>",
            "]<|tool_call_end|>",
            "get_time(",
            "get_weather(city=",
            "days=",
            ", ",
            ")",
        ),
        *("'", "'a'", '"b"', "[1, ", "{'k': ", "True", "None", "\\'", "\\x41", ".5"),
    ],
    "harmony": [
        *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>json", "assistant"),
        *(" to=functions.get_time", " to=functions.get_weather", " to=python", "analysis", "commentary", "final"),
    ],
}
PARTS_OF |= {"mimo": PARTS_OF["qwen3-xml"], "minimax-m1": PARTS_OF["jamba"], "harmony-analysis": PARTS_OF["harmony"]}


def parts_of(name: str) -> list[str]:
    """Parts of any text, more than half of them the format's own."""
    own = PARTS_OF.get(name, [])
    return PARTS + own * (1 + len(PARTS) // len(own)) if own else PARTS


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=120 if EVERYTHING else 25, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99), inside=st.booleans())
def test_any_text_gives_the_same_events_however_it_is_cut(name: str, data: st.DataObject, seed: int, *, inside: bool) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(parts_of(name)), max_size=30)))
    whole = parsed(SPECS[name], [text], inside=inside)
    assert parsed(SPECS[name], text, inside=inside) == whole
    assert parsed(SPECS[name], cut_at_random(text, seed), inside=inside) == whole


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=150 if EVERYTHING else 30, deadline=None)
@given(data=st.data())
def test_nothing_of_any_text_is_lost_or_doubled(name: str, data: st.DataObject) -> None:
    numbers, words = count(), ["WORD", '"city": "WORD"', '"arguments": {"WORD": ["WORD"]}', "'WORD'", "(WORD='WORD')"]
    parts = data.draw(st.lists(st.sampled_from(parts_of(name) + words * 4), max_size=30))
    text = re.sub("WORD", lambda _: f"w{next(numbers)}w", "".join(parts))
    events = parsed(SPECS[name], [text])
    texts = [event.text for event in events if isinstance(event, ContentText | ReasoningText | ArgumentsText)]
    assert re.findall(r"w\d+w", "".join(texts)) == re.findall(r"w\d+w", text)
    is_opened = text.lstrip().startswith(("<think>", "<longcat_think>", "[THINK]"))
    if name != "harmony-analysis" and not is_opened and all(isinstance(event, ContentText) for event in events):
        first = "\n" if name in REASONING else ""
        assert "".join(texts).lstrip(first) == text.lstrip(first)


@pytest.mark.parametrize("name", SPECS)
def test_content_waits_only_as_long_as_it_may_be_a_marker(name: str) -> None:
    parser = SPECS[name].make(ParserSetup(tools=TOOLS))
    assert parser.feed("Hello") == [ContentText("Hello")]
    assert parser.feed(" 1 < 2") == [ContentText(" 1 < 2")]


def test_the_beginning_of_a_marker_is_held_until_it_is_none() -> None:
    parser = SPECS["hermes"].make(ParserSetup(tools=TOOLS))
    assert parser.feed("a\n<tool") == [ContentText("a")]
    assert parser.feed("_") == []
    assert parser.feed("box>") == [ContentText("\n<tool_box>")]
    assert parser.feed("\n<") == []
    assert parser.finish() == [ContentText("\n<")]


def test_arguments_are_streamed_as_they_come() -> None:
    parser = SPECS["hermes"].make(ParserSetup(tools=TOOLS, new_id=lambda: "call_1"))
    assert parser.feed('<tool_call>{"name": "get_weather", "arguments": ') == []
    assert parser.feed('{"ci') == [ToolCallBegun(0, "call_1", "get_weather"), ArgumentsText(0, '{"ci')]
    assert parser.feed('ty": "Par') == [ArgumentsText(0, 'ty": "Par')]
    assert parser.feed('is"') == [ArgumentsText(0, 'is"')]
    assert parser.feed("}") == [ArgumentsText(0, "}"), ToolCallEnded(0, complete=True)]
    assert parser.feed("}</tool_call>") == []


@pytest.mark.parametrize("text", ['[TOOL_CALLS][{"name": "get_time"}]', "[TOOL_CALLS]get_time[ARGS]{}"])
def test_ids_of_mistrals_calls_are_as_long_as_its_templates_demand(text: str) -> None:
    parser = SPECS["mistral"].make(ParserSetup(tools=TOOLS, new_id=lambda: "call_" + "0123456789abcdef" * 2))
    (begun,) = (event for event in parser.feed(text) if isinstance(event, ToolCallBegun))
    assert re.fullmatch("[0-9a-z]{9}", begun.id)


def test_strings_of_glm_are_streamed_as_they_come() -> None:
    parser = SPECS["glm4"].make(ParserSetup(tools=TOOLS, new_id=lambda: "call_1"))
    assert parser.feed("<tool_call>get_weather<arg_key>city</arg_key><arg_value>Par") == [
        ToolCallBegun(0, "call_1", "get_weather"),
        ArgumentsText(0, '{"city": "Par'),
    ]
    assert parser.feed('is"</arg') == [ArgumentsText(0, 'is\\"')]
