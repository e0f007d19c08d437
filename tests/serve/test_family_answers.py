"""What a family's template writes of an earlier answer is read as that answer, by the parsers that suit the template."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from core.text.family_templates_made import FAMILIES

from enginery.contracts.parsers import (
    ArgumentsText,
    ContentText,
    ParserEvent,
    ParserFacts,
    ReasoningText,
    Tool,
    ToolCallBegun,
    ToolCallEnded,
)
from enginery.serve.api.answer_parsers import AnswerFormat, AnswerReader
from enginery.serve.api.anthropic import _input
from enginery.text.template import ChatTemplate
from enginery_parsers import register_parsers

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How is it?"}]
NESTED = {"b": None, "a": [True, {"c": "</x> \"<tool_call>\" 'it'"}]}
ARGUMENTS = {"city": '東京 "x" <y> & it\'s\nthere', "days": 2, "kinds": ["a", "b"], "deep": NESTED, "now": True}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Says how.", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "clock", "description": "Tells.", "parameters": {"type": "object", "properties": {}}},
    },
]
OFFERED = [Tool(name=tool["function"]["name"], parameters=tool["function"]["parameters"]) for tool in TOOLS]
CALLS = [("weather", ARGUMENTS), ("clock", {}), ("weather", {"city": "Rome", "days": -1})]
# Of each family: its parsers of calls and of reasoning, what makes it think, and what ends its answers.
EXPECTED: dict[str, tuple[str, str | None, dict[str, object], str]] = {
    "qwen3.5": ("qwen3-xml", "qwen3", {}, "<|im_end|>"),
    "kimi": ("kimi-k2", "think", {}, "<|im_end|>"),
    "minimax": ("minimax-m2", "think", {}, ""),
    "nemotron": ("nemotron", "think", {}, ""),
    "granite": ("hermes", None, {}, "<|end_of_text|>"),
    "ling": ("hermes", None, {}, "<|role_end|>"),
    "jamba": ("jamba", None, {}, "<|eom|>"),
    "mimo": ("mimo", "qwen3", {"enable_thinking": True}, "<|im_end|>"),
    "glm4.7-flash": ("glm4", "glm", {}, ""),
    "longcat": ("longcat", "longcat-think", {"enable_thinking": True}, "</longcat_s>"),
    "longcat-thinking": ("longcat-tags", "longcat-think", {}, "</longcat_s>"),
    "falcon-h1": ("hermes", None, {}, "<|im_end|>"),
}
SPECS = {spec.name: spec for spec in register_parsers()}
SWITCHES: list[dict[str, object]] = [{}, {"enable_thinking": False}]
FORGETS = {*("nemotron", "kimi"), *(name for name, (_, reasoning, _, _) in EXPECTED.items() if not reasoning)}  # some thoughts


@pytest.fixture(scope="module")
def templates() -> Iterator[dict[str, ChatTemplate]]:
    made = {name: ChatTemplate(source, variables={"bos_token": "<s>"}) for name, source in FAMILIES.items()}
    yield made
    for template in made.values():
        template.close()


def answer(*, thought: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": content}
    message |= {"reasoning_content": thought} if thought else {}
    named = [
        {"id": f"functions.{name}:{index}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments) in enumerate(calls)
    ]
    return message | ({"tool_calls": named} if calls else {})


def parsers_of(name: str) -> tuple[str | None, str | None]:
    facts = ParserFacts(architecture="A", chat_template=FAMILIES[name], added_tokens=frozenset())
    suited = {spec.kind: spec.name for spec in register_parsers() if spec.suits(facts)}
    return suited.get("tools"), suited.get("reasoning")


def read(name: str, prompt: str, pieces: list[str], *, offered: Sequence[Tool] = OFFERED) -> dict[str, object]:
    tools, reasoning, _, _ = EXPECTED[name]
    thinks = SPECS[reasoning] if reasoning else None
    is_inside = bool(thinks and thinks.is_inside and thinks.is_inside(prompt))
    reader = AnswerReader(AnswerFormat(reasoning=thinks, tool_parser=SPECS[tools], tools=offered, is_inside=is_inside))
    found: dict[str, Any] = {"thought": "", "content": "", "calls": []}
    for place, piece in enumerate(pieces, 1):
        for event in reader.feed(piece, finished=place == len(pieces)):
            match event:
                case ReasoningText(text):
                    found["thought"] += text
                case ContentText(text):
                    found["content"] += text
                case ToolCallBegun():
                    found["calls"].append([event.name, ""])
                case ArgumentsText():
                    found["calls"][event.index][1] += event.text
                case ToolCallEnded():
                    assert event.complete
    return {"thought": found["thought"].strip(), "content": found["content"].strip()} | {
        "calls": [(called, json.loads(arguments)) for called, arguments in found["calls"]]
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_a_checkpoint_gets_its_parsers(name):
    assert parsers_of(name) == EXPECTED[name][:2]


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize(
    "said",
    [
        {"thought": "Let me see: {", "content": "I look.", "calls": CALLS},
        {"thought": "", "content": "", "calls": CALLS[1:2]},
        {"thought": "hm", "content": "It is <b>, I think.", "calls": []},
    ],
    ids=["all", "a call", "no call"],
)
def test_an_answer_as_the_template_writes_it_is_read_back(name, said, templates):
    variables, end = EXPECTED[name][2:]
    whole = templates[name].render([*ASKED, answer(**said)], tools=TOOLS, variables=variables, add_generation_prompt=False)
    prompts = [templates[name].render(ASKED, tools=TOOLS, variables=variables, switches=switches) for switches in SWITCHES]
    prompt = next((prompt for prompt in prompts if whole.startswith(prompt)), prompts[0].removesuffix("<think>\n"))
    assert whole.startswith(prompt)
    text = whole.removeprefix(prompt).rstrip("\n").removesuffix(end)
    written = said if said["thought"] in whole else said | {"thought": ""}
    assert written == said or name in FORGETS
    assert read(name, prompt, [text]) == written
    assert read(name, prompt, [*text, ""]) == written
    for place in range(0, len(text), 3):
        assert read(name, prompt, [text[:place], text[place:]]) == written


@pytest.mark.parametrize("name", [name for name, (_, reasoning, _, _) in EXPECTED.items() if reasoning and name != "nemotron"])
@pytest.mark.parametrize("closes", ["never", "behind"])
def test_calls_in_reasoning_that_nothing_follows_are_calls(name, closes, templates):
    """MiMo, Qwen and Kimi write such, and the client would get an empty answer. A strict tool's call followed no grammar."""
    variables, end = EXPECTED[name][2:]
    said = {"thought": "Let me see.", "content": "", "calls": CALLS}
    prompt = templates[name].render(ASKED, tools=TOOLS, variables=variables)
    whole = templates[name].render([*ASKED, answer(**said)], tools=TOOLS, variables=variables, add_generation_prompt=False)
    close = "</longcat_think>" if "longcat" in name else "</think>"
    text = whole.removeprefix(prompt).rstrip("\n").removesuffix(end).replace(close, "", 1) + (close if closes == "behind" else "")
    for pieces in ([text], [*text, ""]):
        assert read(name, prompt, pieces) == said
    strict = [dataclasses.replace(tool, strict=True) for tool in OFFERED]
    assert read(name, prompt, [text], offered=strict)["calls"] == []


@pytest.mark.parametrize("name", ["qwen3.5", "glm4.7-flash", "longcat", "longcat-thinking"])
def test_reasoning_that_is_closed_for_a_forced_call_ends_as_in_the_template(name, templates):
    (spec,) = (spec for spec in register_parsers() if spec.name == EXPECTED[name][1])
    variables = EXPECTED[name][2]
    assert spec.is_inside(templates[name].render(ASKED, tools=TOOLS, variables=variables))
    messages = [*ASKED, answer(thought="hm", content="It is.", calls=[])]
    written = templates[name].render(messages, tools=TOOLS, variables=variables, add_generation_prompt=False)
    assert f"hm{spec.close}It is." in written


def events_of(reader: AnswerReader, pieces: Sequence[str]) -> list[ParserEvent]:
    return [event for place, piece in enumerate(pieces, 1) for event in reader.feed(piece, finished=place == len(pieces))]


def content_of(events: Sequence[ParserEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentText))


@pytest.mark.parametrize(
    "pieces", [list, lambda text: [text], lambda text: [*text, ""]], ids=["by characters", "whole", "then nothing"]
)
@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("mistral", '[TOOL_CALLS][{"name": "clock", "arguments": {}}]', 1),
        ("mistral", ' [TOOL_CALLS] [{"name": "clock", "arguments": {}}]', 1),
        ("mistral-args", "[TOOL_CALLS]clock[ARGS]{}", 1),
        ("mistral-args", '["[TOOL_CALLS]clock[ARGS]{}"]', 0),
        ("mistral", ' [ [], "[TOOL_CALLS][]"]', 0),
        ("mistral", "[", 0),
        ("hermes", '[{"a": "<tool_call>"}, 1]', 0),
        ("hermes", '"<tool_call>"', 0),
    ],
)
def test_calls_that_begin_with_a_bracket_are_no_list_of_json(name, text, calls, pieces):
    reader = AnswerReader(AnswerFormat(tool_parser=SPECS[name], tools=OFFERED, or_json=True))
    events = events_of(reader, pieces(text))
    assert sum(isinstance(event, ToolCallBegun) for event in events) == calls
    assert calls or content_of(events) == text
    assert not (calls and content_of(events).strip())


CALLS_OF = {
    "glm4": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg",
    "qwen3-xml": "<tool_call>\n<function=weather>\n<parameter=days>\n2\n</parameter>\n<parameter=city>\nRome\n</parameter>\n",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="days">2</parameter>\n',
    "lfm2": '<|tool_call_start|>[weather(city="Rome", days=2, now=True',
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2',
}


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", CALLS_OF)
def test_an_answer_that_is_cut_within_a_call_ends_in_it_and_has_no_content(name, parallel):
    begun = 0
    for end in range(1, len(CALLS_OF[name]) + 1):
        reader = AnswerReader(AnswerFormat(tool_parser=SPECS[name], tools=OFFERED, parallel=parallel))
        events = events_of(reader, [CALLS_OF[name][:end], ""])
        if any(isinstance(event, ToolCallBegun) for event in events):
            begun += 1
            assert events[-1] == ToolCallEnded(0, complete=False), CALLS_OF[name][:end]
            assert (reader.ended_in_call, reader.is_over, content_of(events)) == (True, False, ""), CALLS_OF[name][:end]
    assert begun > 10


def test_half_a_character_of_a_marker_that_was_forced_is_no_content():
    reader = AnswerReader(AnswerFormat(tool_parser=SPECS["deepseek-v3.1"], tools=OFFERED, calls_only=True))
    assert events_of(reader, ["<\uff5ctool▁calls▁begin\uff5c><\uff5ctool", "\ufffd"]) == []
    assert reader.ended_in_call


@pytest.mark.parametrize("arguments", ['{"n":12345678901234567890123}', '{"n":1e400}', '{"s":"\\ud83d"}', '{"a":[{}]}'])
def test_a_message_has_arguments_as_they_are_written(arguments):
    assert msgspec.json.encode(_input(arguments)).decode() == arguments
    assert [_input(other) for other in (arguments[:-1], "", "[1]", '{"a":' * 100_000)] == [{}] * 4
