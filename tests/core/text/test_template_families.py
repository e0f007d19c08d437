"""What the families' templates are made of renders as with transformers, with calls, reasoning and content in parts."""

from __future__ import annotations

import pytest
from family_templates_made import FAMILIES, MINIMAX_TEXT
from tokenizers_made import byte_level, save

from enginery.errors import RequestError
from enginery.text.template import ChatTemplate
from enginery.text.tokenizer import Tokenizer

PROPERTIES = {
    "city": {"type": "string", "description": "Where <b>?"},
    "days": {"type": "integer", "default": 3},
    "kinds": {"type": "array", "items": {"type": "string"}},
    "unit": {"enum": ["C", "F"]},
    "at": {"oneOf": [{"type": "string"}, {"type": "number"}], "nullable": True},
    "many": {"type": ["string", "null"]},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says <how> it's.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    },
    {
        "type": "function",
        "function": {"name": "clock", "description": "Tells.", "parameters": {"type": "object", "properties": {}}},
    },
]
ARGUMENTS = {"city": '東京 "x" <y> & it\'s', "days": 2, "kinds": ["a", "b"], "deep": {"b": None, "a": [True]}, "now": True}
CALLS = [
    {"id": "functions.weather:0", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}},
    {"id": "functions.clock:1", "type": "function", "function": {"name": "clock", "arguments": {}}},
]
TALK = [
    {"role": "system", "content": "Be <brief>. /no_think"},
    {"role": "user", "content": " How is it? "},
    {"role": "assistant", "content": "Fine."},
    {"role": "user", "content": "And there?"},
]
CALLED = [
    *TALK,
    {"role": "assistant", "content": "I look.", "tool_calls": CALLS},
    {"role": "tool", "content": '{"t": 1}', "tool_call_id": "functions.weather:0"},
    {"role": "tool", "content": "12:00", "tool_call_id": "functions.clock:1"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nWarm.#"},
    {"role": "user", "content": "Thanks"},
]
THOUGHT = [*TALK, {"role": "assistant", "content": "", "tool_calls": CALLS[:1], "reasoning_content": "so\n"}, CALLED[5]]
SILENT = [*TALK, {"role": "assistant", "content": None, "tool_calls": CALLS}, *CALLED[5:7]]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two"}]}]
NO_CALLS = ("gemma",)
TAKES_PARTS = ("gemma", "qwen3.5", "minimax", "granite", "glm4.7-flash")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_conversation_renders_as_with_transformers(name, add_generation_prompt, both):
    ours, theirs = both(FAMILIES[name], TALK, add_generation_prompt=add_generation_prompt)
    assert ours == theirs
    assert "And there?" in ours


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_developer_says_is_written_as_what_the_system_says(name, ours):
    said = ours(FAMILIES[name], TALK)
    assert ours(FAMILIES[name], [{**TALK[0], "role": "developer"}, *TALK[1:]]) == said
    both = [{"role": "system", "content": "Be"}, {"role": "developer", "content": "<brief>. /no_think"}, *TALK[1:]]
    assert ours(FAMILIES[name], both) == said.replace("Be <", "Be\n\n<")


ASIDE = {"role": "system", "content": "Now in French."}
AT_THE_BEGINNING = {"gemma", "gpt-oss", "granite", "longcat-thinking"}  # nowhere else


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_what_the_system_says_on_the_way_is_written(name, role, ours):
    """gpt-oss' and LongCat-Thinking's leave it out, as others do; there it is told with what was said at the beginning."""
    later = [*TALK[:3], {**ASIDE, "role": role}, TALK[3]]
    written = ours(FAMILIES[name], later)
    assert written.count("Now in French.") == 1
    first = {**TALK[0], "content": f"{TALK[0]['content']}\n\nNow in French."}
    assert (written == ours(FAMILIES[name], [first, *TALK[1:]])) == (name in AT_THE_BEGINNING)
    assert ours(FAMILIES[name], [*TALK[1:3], {**ASIDE, "role": role}, TALK[3]]).count("Now in French.") == 1


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NO_CALLS])
def test_tools_and_calls_render_as_with_transformers(name, both):
    for messages in (CALLED, THOUGHT, SILENT):
        ours, theirs = both(FAMILIES[name], messages, tools=TOOLS)
        assert ours == theirs
        assert "weather" in ours
        assert "東京" in ours


@pytest.mark.parametrize("name", TAKES_PARTS)
def test_content_in_parts_renders_as_with_transformers(name, both):
    ours, theirs = both(FAMILIES[name], PARTS)
    assert ours == theirs
    assert "two" in ours


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_text_is_a_part_for_a_template_that_takes_nothing_else(add_generation_prompt, both):
    """transformers gives it what it is given, so there callers write parts; here clients send text."""
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in TALK]
    ours, theirs = both(MINIMAX_TEXT, parts, add_generation_prompt=add_generation_prompt)
    assert ours == theirs
    template = ChatTemplate(MINIMAX_TEXT, variables={})
    try:
        assert template.render(TALK, add_generation_prompt=add_generation_prompt) == theirs
        with pytest.raises(RequestError, match="final message"):
            template.render([*TALK, {"role": "assistant", "content": "Fine, "}], continue_final_message=True)
    finally:
        template.close()


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        *(("gpt-oss", {"reasoning_effort": "high"}), ("qwen3.5", {"enable_thinking": False}), ("jamba", {"today": "1"})),
        *(
            ("mimo", {"enable_thinking": True}),
            ("glm4.7-flash", {"enable_thinking": False}),
            ("longcat", {"enable_thinking": True}),
        ),
        *(("longcat-thinking", {"enable_thinking": False}), ("mimo", {"enable_thinking": True, "keep_all_reasoning": True})),
    ],
)
def test_the_templates_variables_are_given(name, variables, both):
    ours, theirs = both(FAMILIES[name], TALK, **variables)
    assert ours == theirs
    assert ours != both(FAMILIES[name], TALK)[0] or name == "jamba"


@pytest.mark.parametrize(
    ("name", "messages", "why"),
    [
        ("gemma", [TALK[1], TALK[1]], "roles must alternate"),
        ("gpt-oss", [TALK[1], CALLED[5]], "no previous assistant message"),
        ("gpt-oss", [TALK[1], {"role": "assistant", "content": "<|channel|>final<|message|>x"}], "tags in the content"),
        ("minimax", [TALK[1], CALLED[5]], "no tool call"),
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(name, messages, why, tmp_path):
    folder = save(byte_level(), tmp_path, chat_template=FAMILIES[name])
    ours = ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder))
    try:
        with pytest.raises(RequestError, match=why) as refused:
            ours.render(messages)
        assert refused.value.param == "messages"
    finally:
        ours.close()
