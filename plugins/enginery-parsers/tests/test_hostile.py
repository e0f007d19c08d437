"""Outputs that nobody would write: they take linear time and bounded memory, and none of them is lost."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator

import pytest
from pairwise import EVERYTHING

from enginery.api import ArgumentsText, ContentText, ParserSetup, ParserSpec, ReasoningText, Tool, ToolCallBegun, ToolCallEnded
from enginery_parsers.json_text import DEPTH_MAX
from enginery_parsers.source import HELD_MAX
from enginery_parsers.spec import PARSERS
from enginery_parsers.tagged import argument_types

SPECS = {spec.name: spec for spec in PARSERS}
TOOLS = (Tool(name="f", parameters={"properties": {"s": {"type": "string"}}}),)
MILLION = 1_000_000
LENGTH = MILLION if EVERYTHING else 250_000


def hostile(length: int) -> dict[str, str]:
    """By what they are about; each of about so many characters."""
    return {
        "angles": "<" * length,
        "braces": "{" * length,
        "lines of braces": "\n{" * (length // 20),
        "line breaks": "\n" * length,
        "blanks": " " * length,
        "half markers": "<tool_cal" * (length // 9),
        "markers": "<tool_call>" * (length // 11),
        "markers of reasoning": "<think></think>" * (length // 15),
        "half calls in reasoning": "<think>" + '<tool_call>{"a' * (length // 14),
        "calls that are thought of": "<think>" + "<tool_call>{}</tool_call>\n." * (length // 27),
        "a long name": '<tool_call>{"name": "' + "f" * length,
        "a deep object": '<tool_call>{"name": "f", "arguments": ' + '{"a":' * (length // 5),
        "a deep list": '{"name": "f", "arguments": {"a": ' + "[" * length,
        "a long number": '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * length,
        "a long string": '<tool_call>{"name": "f", "arguments": {"a": "' + "\\n" * (length // 2),
        "long arguments before the name": '<tool_call>{"arguments": {"a": "' + "x" * length,
        "a long value": "<tool_call>f<arg_key>a</arg_key><arg_value>" + "<" * length,
        "a long string of GLM": "<tool_call>f<arg_key>s</arg_key><arg_value>" + '"' * length,
        "a long head": "<|tool_call_begin|>functions." + "f" * length,
        "many heads": "<|tool_call_begin|>functions.f:0" * (length // 32),
        "a long string of Python": "<|tool_call_start|>[f(a='" + "'" * length,
        "quotes of Python": "<|tool_call_start|>[f(a='" + "'                x" * (length // 18),
        "a deep list of Python": "<|tool_call_start|>[f(a=" + "[" * length,
        "a long number of Python": "<|tool_call_start|>[f(a=" + "1" * length,
        "escapes of Python": "<|tool_call_start|>[f(a='" + "\\x4" * (length // 16),
        "a long value of Qwen": "<tool_call>\n<function=f>\n<parameter=s>\n" + "\n" * length,
        "headers": "<|start|>" * (length // 9),
        "a long header": "<|start|>assistant to=functions." + "f" * length,
        "blanks in headers": ("<|channel|>final" + " " * 800 + "x<|message|>") * (length // 829),
        "a long message": "<|channel|>commentary to=functions.f<|message|>" + '{"a": "' + "<|cal" * (length // 5),
        "many calls": '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * (length // 260),
    }


HOSTILE = hostile(LENGTH)


HELD = [
    "angles",
    "braces",
    "a long string",
    "long arguments before the name",
    "a long value",
    "a long value of Qwen",
    "a long header",
]
ALL = ["hermes", "llama3-json", "deepseek-v3", "glm4", "qwen3", "qwen3-xml", "kimi-k2", "lfm2", "harmony", "harmony-analysis"]


def texts(spec: ParserSpec, pieces: Iterator[str]) -> list[str]:
    """The texts of all events, neighbouring ones joined, as a list of kinds and texts."""
    parser = spec.make(ParserSetup(tools=TOOLS, new_id=lambda: "call_0"))
    found: list[list[str]] = []
    last: object = None
    for events in [*map(parser.feed, pieces), parser.finish()]:
        for event in events:
            kind = (type(event), event.index) if isinstance(event, ArgumentsText) else type(event)
            text = event.text if isinstance(event, ContentText | ReasoningText | ArgumentsText) else str(event)
            if kind != last or isinstance(event, ToolCallBegun | ToolCallEnded):
                found.append([])
            found[-1].append(text)
            last = kind
    return ["".join(parts) for parts in found]


def in_pieces(text: str, length: int) -> Iterator[str]:
    return (text[start : start + length] for start in range(0, len(text), length))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("about", HOSTILE)
def test_long_outputs_take_linear_time_and_give_the_same_however_they_are_cut(name: str, about: str) -> None:
    text = HOSTILE[about]
    began_s = time.process_time()
    whole = texts(SPECS[name], iter([text]))
    in_parts = texts(SPECS[name], in_pieces(text, 997))
    assert time.process_time() - began_s < 8 * LENGTH / MILLION
    assert in_parts == whole


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("about", HELD)
def test_what_is_kept_is_bounded(name: str, about: str) -> None:
    text = hostile(MILLION)[about]
    parser = SPECS[name].make(ParserSetup(tools=TOOLS, new_id=lambda: "call_0"))
    tracemalloc.start()
    try:
        for piece in in_pieces(text, 4_096):
            parser.feed(piece)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 3 * HELD_MAX


def test_too_deep_arguments_end_the_call() -> None:
    text = '{"name": "f", "arguments": ' + '{"a":' * (DEPTH_MAX + 1)
    begun, arguments, ended, content = texts(SPECS["hermes"], iter(["<tool_call>" + text]))
    assert arguments == '{"a":' * DEPTH_MAX
    assert "complete=False" in ended
    assert content == '{"a":'
    assert "name='f'" in begun


def test_an_undecided_call_that_is_too_long_is_content_and_the_search_goes_on() -> None:
    text = '<tool_call>{"arguments": {"a": "' + "x" * HELD_MAX + '"}, "name": "f"}</tool_call>'
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    content, begun, arguments, _ = texts(SPECS["hermes"], in_pieces(text + call, 1_000))
    assert content == text
    assert "name='f'" in begun
    assert arguments == "{}"


def test_what_is_too_long_ends_at_the_same_character_however_it_is_cut() -> None:
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>" + "x" * 1_000 + "<tool_call>f</tool_call>" + "x" * HELD_MAX
    assert texts(SPECS["glm4"], iter([text])) == texts(SPECS["glm4"], in_pieces(text, 100))


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        ('["\\ud800 é\n"]', '{"v": ["\\ud800 é\\n"]}'),
        ('{"a": "1\n2"}', '{"v": {"a": "1\\n2"}}'),
        ('{\n"a": 1E400}', '{"v": {\n"a": 1E400}}'),
        ("1\n2", '{"v": "1\\n2"}'),
        ('["\x1b[1m\x0b"]', '{"v": ["\\u001b[1m\\u000b"]}'),
    ],
)
def test_control_characters_in_the_strings_of_json_are_escaped_within_tags_too(value: str, arguments: str) -> None:
    text = f"<tool_call>f\n<arg_key>v</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    _, found, ended = texts(SPECS["glm4"], iter([text]))
    assert (found, "complete=True" in ended) == (arguments, True)


def test_a_number_that_python_alone_writes_so_may_be_longer_than_floats() -> None:
    _, found, ended = texts(SPECS["lfm2"], iter([f"<|tool_call_start|>[f(a=+{'1' * 400})]<|tool_call_end|>"]))
    assert (found, "complete=True" in ended) == (f'{{"a": {"1" * 400}}}', True)


def test_an_id_that_mistral_writes_twice_is_another_the_second_time() -> None:
    new_ids = iter(["call_of_ours"])
    parser = SPECS["mistral-args"].make(ParserSetup(tools=TOOLS, new_id=lambda: next(new_ids)))
    events = [*parser.feed("[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}" * 2), *parser.finish()]
    assert [event.id for event in events if isinstance(event, ToolCallBegun)] == ["abc123def", "l_of_ours"]


def test_a_reference_into_another_document_tells_no_type() -> None:
    definitions = {"$defs": {"text": {"type": "string"}}}
    for reference, types in (("#/$defs/text", {"string"}), ("other/$defs/text", set())):
        assert argument_types({"properties": {"v": {"$ref": reference}}, **definitions}) == {"v": types}
