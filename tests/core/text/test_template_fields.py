"""Variables, templates of a caller's own, and messages that are continued: as transformers does it, or refused by name."""

from __future__ import annotations

import json
import time

import pytest
from templates_made import GLM, LEVELS, PLAIN, QWEN, TEMPLATES
from tokenizers_made import byte_level, save
from transformers import AutoTokenizer

from enginery.errors import ConfigError, RequestError
from enginery.text.template_process import Limits
from enginery.text.text_side import TextSide

ASKED = [{"role": "user", "content": "1+1?"}]
TALK = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2", "reasoning_content": "easy"},
    {"role": "user", "content": "and 2+2? 日本"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds <b>", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("qwen", {}),
        ("qwen", {"enable_thinking": False}),
        ("qwen", {"enable_thinking": True}),
        ("glm", {"enable_thinking": False}),
        ("glm", {"enable_thinking": True}),
        ("deepseek", {"thinking": True}),
        ("deepseek", {"thinking": False}),
        ("levels", {"reasoning_effort": "low"}),
        ("levels", {"reasoning_effort": None}),
    ],
)
@pytest.mark.parametrize("messages", [ASKED, TALK], ids=["asked", "talk"])
def test_variables_render_as_with_transformers(both, name, variables, messages):
    got, want = both(TEMPLATES[name], messages, **variables)
    assert got == want


def test_a_variable_changes_the_prompt(ours):
    assert ours(QWEN, variables={"enable_thinking": False}).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert ours(QWEN).endswith("<|im_start|>assistant\n")
    assert ours(GLM, variables={"enable_thinking": False}) == "[gMASK]<sop><|user|>\n1+1?/nothink<|assistant|>\n<think></think>"


def test_tools_and_variables_go_together(both):
    got, want = both(QWEN, TALK, tools=TOOLS, enable_thinking=False)
    assert got == want
    assert "Adds <b>" in got


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "said",
    ["The answer", "The answer is ", "  spaced", "ends in a line\n", "", "<think>\nso far", "日本 😀"],
    ids=["word", "blank", "leading", "line", "nothing", "reasoning", "unicode"],
)
def test_a_message_is_continued_as_with_transformers(both, name, said):
    got, want = both(TEMPLATES[name], [*ASKED, {"role": "assistant", "content": said}], continue_final_message=True)
    assert got == want
    assert got.rstrip().endswith(said.strip())


def test_a_continued_message_may_have_reasoning(both):
    final = {"role": "assistant", "content": "It is", "reasoning_content": "1 and 1"}
    got, want = both(QWEN, [*ASKED, final], continue_final_message=True)
    assert got == want
    assert got.endswith("<think>\n1 and 1\n</think>\n\nIt is")


def test_the_mark_of_transformers_in_a_message_cuts_nothing(ours):
    messages = [{"role": "user", "content": "CONTINUE_FINAL_MESSAGE_TAG "}, {"role": "assistant", "content": "So"}]
    assert ours(PLAIN, messages, continue_final_message=True) == "<user>CONTINUE_FINAL_MESSAGE_TAG<assistant>So"


@pytest.mark.parametrize(
    ("final", "given", "why"),
    [
        ({"role": "user", "content": "x"}, {}, "of the role user"),
        ({"role": "assistant", "content": None}, {}, "needs text"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, {}, "tool_calls"),
        ({"role": "assistant", "content": "x"}, {"add_generation_prompt": True}, "goes without add_generation_prompt"),
    ],
)
def test_what_cannot_be_continued_is_refused(ours, final, given, why):
    with pytest.raises(RequestError, match=why) as refused:
        ours(QWEN, [*ASKED, final], continue_final_message=True, **given)
    assert refused.value.param == "continue_final_message"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{% if not loop.last %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_loses_the_final_message_is_told(ours, template):
    with pytest.raises(RequestError, match="rewrites or leaves out the final message") as refused:
        ours(template, [*ASKED, {"role": "assistant", "content": "so far"}], continue_final_message=True)
    assert refused.value.param == "continue_final_message"


def test_a_final_message_that_the_template_rearranges_is_refused_as_by_transformers(ours, tmp_path):
    messages = [*ASKED, {"role": "assistant", "content": "<think>\na\n\n\n</think>It is"}]
    theirs = AutoTokenizer.from_pretrained(save(byte_level(), tmp_path, chat_template=QWEN))
    with pytest.raises(ValueError, match="does not appear in the chat"):
        theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    with pytest.raises(RequestError, match="rewrites or leaves out the final message"):
        ours(QWEN, messages, continue_final_message=True)


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"]
)
@pytest.mark.parametrize("value", [[], False, "x"], ids=repr)
def test_a_variable_replaces_no_field(ours, name, value):
    with pytest.raises(RequestError, match=f"'{name}' is not the caller's to set") as refused:
        ours(QWEN, variables={name: value})
    assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "name",
    [
        *("tokenize", "tokenizer_kwargs", "return_dict", "padding", "truncation", "max_length", "return_tensors"),
        *("raise_exception", "strftime_now", "range", "namespace", "dict", "bos_token", "__class__", "_x", "self.x", "a b", ""),
        *("x" * 1000, "1"),
    ],
)
def test_a_variable_replaces_no_function_token_or_argument(ours, name):
    template = "{{ raise_exception and strftime_now and range and namespace and dict and bos_token and tokenize and max_length }}"
    with pytest.raises(RequestError) as refused:
        ours(template, variables={name: "x"})
    assert refused.value.param == "chat_template_kwargs"
    assert len(str(refused.value)) < 400


def test_python_names_with_a_meaning_are_variables_like_others(ours):
    assert ours("{{ self }}{{ args }}", variables={"args": "b"}).endswith("b")


def test_a_variable_that_the_template_does_not_use_is_refused_with_those_it_does(ours):
    with pytest.raises(
        RequestError, match=r"does not use the variable 'enable_thinkin'; its variables are enable_thinking,"
    ) as refused:
        ours(QWEN, variables={"enable_thinkin": False})
    assert refused.value.param == "chat_template_kwargs"
    with pytest.raises(RequestError, match=r"'x'; its variables are none"):
        ours(PLAIN, variables={"x": 1})


def test_many_variables_are_refused(ours):
    with pytest.raises(RequestError, match="65 variables, at most 64"):
        ours(QWEN, variables={f"v{place}": 0 for place in range(65)})


def test_switches_go_to_the_templates_that_have_them(ours):
    off = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert ours(QWEN, switches=off) == ours(QWEN, variables={"enable_thinking": False})
    assert ours(TEMPLATES["deepseek"], switches=off) == ours(TEMPLATES["deepseek"], variables={"thinking": False})
    assert ours(LEVELS, switches=off).startswith("<|system|>Reasoning: none")
    assert ours(PLAIN, switches=off) == ours(PLAIN)
    with pytest.raises(RequestError, match="has none of reasoning_effort, enable_thinking, thinking") as refused:
        ours(PLAIN, switches=off, needs_switch=True)
    assert refused.value.param == "reasoning_effort"


def test_a_template_of_the_caller_s_own_comes_instead(ours):
    assert ours(QWEN, template="{% for m in messages %}{{ m.content }}{{ mood }}{% endfor %}", variables={"mood": "!"}) == "1+1?!"
    assert ours(None, template="{{ messages[0].content }}") == "1+1?"


@pytest.mark.parametrize(
    ("template", "why", "param"),
    [
        ("{% for x in", "the request's chat template is broken in line 1: .*; correct it$", "chat_template"),
        ("{{ ''.__class__.__mro__ }}", "the request's chat template refuses", "messages"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "took over 0.3 s", "messages"),
        ("{{ 9 ** (9 ** 9) }}", "took over 0.3 s|refuses", "messages"),
        ("{% if x %}{{ 9 ** (9 ** 9) }}{% endif %}", "took over 0.3 s|refuses", "messages"),
        ("{% include '/etc/passwd' %}", "no loader", "messages"),
    ],
)
def test_a_hostile_template_of_a_caller_harms_only_its_own_answer(ours, template, why, param):
    began = time.perf_counter()
    with pytest.raises(RequestError, match=why) as refused:
        ours(PLAIN, template=template, variables={"x": 0} if "if x" in template else {}, limits=Limits(cpu_s=0.3))
    assert refused.value.param == param
    assert time.perf_counter() - began < 40
    assert ours(PLAIN) == "<user>1+1?<assistant>"


def test_values_of_variables_may_be_nested_and_are_bounded(ours):
    assert ours("{{ v.a[0].b }}", variables={"v": {"a": [{"b": 7}]}}) == "7"
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="cannot be given to a template"):
        ours("{{ v }}", variables={"v": deep})
    with pytest.raises(RequestError, match="cannot be given to a template"):
        ours("{{ v }}", variables={"v": 1 << 70})


def test_a_file_comes_before_the_checkpoint_s_template(tmp_path):
    folder = save(byte_level(), tmp_path, chat_template="old")
    (tmp_path / "mine.jinja").write_text("mine: {{ messages[0].content }}")
    side = TextSide.load(folder, chat_template=str(tmp_path / "mine.jinja"))
    assert side.template.render(ASKED) == "mine: 1+1?"
    side.template.close()
    with pytest.raises(ConfigError, match=r"--chat-template .*nope cannot be read"):
        TextSide.load(folder, chat_template=str(tmp_path / "nope"))


def test_the_tokenizer_and_its_template_may_lie_in_another_folder(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    words = save(byte_level(), tmp_path / "words", chat_template="words")
    side = TextSide.load(model, tokenizer_folder=words)
    assert (side.template.source, side.defaults.temperature) == ("words", 0.5)
    assert side.tokenizer.decode(side.tokenizer.encode("hello", add_special_tokens=False), skip_special_tokens=False) == "hello"
