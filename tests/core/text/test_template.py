"""Templates render as with transformers, and a hostile one harms only its own answer."""

from __future__ import annotations

import json
import time

import pytest
from family_templates_made import FAMILIES
from tokenizers_made import byte_level, save
from transformers import AutoTokenizer

from enginery.contracts.parsers import writes_tools
from enginery.errors import CheckpointError, ConfigError, RequestError
from enginery.text.template import ChatTemplate, read_template
from enginery.text.template_process import Limits
from enginery.text.tokenizer import Tokenizer

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "日本 😀"},
    {"role": "assistant", "content": None},
    {"role": "user", "content": "more"},
]
CHATML = """{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}{{ bos_token }}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.get('content', '-') + eos_token + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
FEATURES = """{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}
{% set ns.n = ns.n + 1 %}{{ m | tojson }}{{ loop.index }}{% generation %}{{ m.role|upper }}{% endgeneration %}
{% if ns.n > 1 %}{% break %}{% endif %}{% endfor %}{{ tools is none }}{{ ns.n }}{{ pad_token is defined }}
{{ dict(a=1) | tojson(indent=2) }}"""


@pytest.fixture
def rendered():
    made = []

    def render(template, messages=MESSAGES, limits=None, **variables):
        made.append(ChatTemplate(template, variables=variables, limits=limits))
        return made[-1].render(messages)

    yield render
    for template in made:
        template.close()


@pytest.mark.parametrize("template", [CHATML, FEATURES], ids=["chatml", "features"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_it_renders_as_transformers_does(template, add_generation_prompt, tmp_path):
    folder = save(byte_level(), tmp_path, chat_template=template)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder))
    want = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert ours.render(MESSAGES, add_generation_prompt=add_generation_prompt) == want
    ours.close()


def test_content_that_is_none_stays_so_where_the_template_asks_for_it():
    asking = "{% for m in messages %}{{ 'none' if m['content'] is none else m['content'] }}{% endfor %}"
    for template, expected in ((asking, "none"), ("{% for m in messages %}{{ m.content }}{% endfor %}", "")):
        ours = ChatTemplate(template, variables={})
        assert ours.render([{"role": "assistant", "content": None}]) == expected
        ours.close()


@pytest.mark.parametrize("asks", ["m.content is not none", "m['content'] != none", "m['content'] == None"])
def test_a_call_without_content_renders_where_the_template_asks_in_other_words(asks):
    """Clients send null as the content of every call; left out, it would be no none, and nothing to put to a text."""
    says_none = "==" in asks
    then, other = ("-", "{{ m['content'] + '|' }}") if says_none else ("{{ m['content'] + '|' }}", "-")
    ours = ChatTemplate(
        f"{{% for m in messages %}}{{% if {asks} %}}{then}{{% else %}}{other}{{% endif %}}{{% endfor %}}", variables={}
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert ours.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]) == "x|-"
    ours.close()


SIMPLE = "{% for m in messages if m.role in ('system', 'user') %}<{{ m.role }}>{{ m.content }}{% endfor %}"
KNOWS = "{% for m in messages %}<{{ 'd' if m.role == 'developer' else m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("roles", "simple", "knows"),
    [
        ("d u", "<system>0<user>1", "<d>0<user>1"),
        ("s d u d", "<system>0\n\n1<user>2<system>3", "<system>0\n\n1<user>2<d>3"),
        ("d s d u", "<system>0\n\n1\n\n2<user>3", "<d>0\n\n1\n\n2<user>3"),
        ("s s d u", "<system>0<system>1<system>2<user>3", "<system>0<system>1<d>2<user>3"),
        ("u d", "<user>0<system>1", "<user>0<d>1"),
        ("d", "<system>0", "<d>0"),
    ],
)
def test_what_a_developer_says_is_the_system_s_where_the_template_knows_no_developer(roles, simple, knows):
    """Such templates leave it out, and many take one message of the system, at the beginning."""
    names = {"d": "developer", "s": "system", "u": "user"}
    messages = [{"role": names[role], "content": str(place)} for place, role in enumerate(roles.split())]
    for source, expected in ((SIMPLE, simple), (KNOWS, knows)):
        ours = ChatTemplate(source, variables={})
        assert ours.render(messages) == expected
        ours.close()


USERS_ALONE = "{% for m in messages if m.role == 'user' %}{{ m.content }}|{% endfor %}"
FIRST = "{{ messages[0].content | replace('/think', '') | tojson if messages[0].role == 'system' }}" + USERS_ALONE
ONCE = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('too late') }}{% endif %}"
ONCE += "{{ m.content }}|{% endfor %}"
A_PART = "{% for m in messages %}{% if m.role == 'user' or loop.first %}{{ m.content[0]['text'] }}|{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "said", "expected"),
    [
        (FIRST, ["s:a\n/think", "u:b"], '"a\\n"b|'),
        (FIRST, ["s:a", "u:b", "s:b", "s:c", "u:d"], '"a\\n\\nb\\n\\nc"b|d|'),
        (FIRST, ["u:b c", "d:c"], '"c"b c|'),
        (ONCE, ["s:a", "u:b", "d:c", "u:d"], "a\n\nc|b|d|"),
        (A_PART, ["s:a", "u:b", "d:c", "u:d"], "a\n\nc|b|d|"),
    ],
)
def test_what_a_template_leaves_out_or_refuses_on_the_way_is_told_at_the_beginning(source, said, expected, ours):
    roles = {"s": "system", "d": "developer", "u": "user"}
    assert ours(source, [{"role": roles[each[0]], "content": each[2:]} for each in said]) == expected


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("messages", [["s", "u"], ["u", "s"], ["u", "s", "u", "s"]], ids="".join)
def test_a_template_that_leaves_it_out_everywhere_is_told_of(role, messages, ours):
    told = [{"role": "user" if each == "u" else role, "content": each} for each in messages]
    with pytest.raises(RequestError, match="leaves out what the system or the developer says; let a user") as refused:
        ours(USERS_ALONE, told)
    assert refused.value.param == "messages"


def test_a_file_of_its_own_comes_before_the_configuration(tmp_path):
    save(byte_level(), tmp_path, chat_template="old")
    assert read_template(tmp_path) == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert read_template(tmp_path) == "new"


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("tools", [(), ({"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}},)])
def test_of_named_templates_tools_have_their_own_as_with_transformers(tmp_path, tools, in_files):
    """As Hermes 2 and 3 have them. Each is a whole template: its last line break is left out, others are kept."""
    with_tools = "{% macro name(t) %}{{ t.function.name }}{% endmacro %}\n{%- for t in tools %}{{ name(t) }}\n{% endfor %}\nused\n"
    named = [{"name": "default", "template": f"{FEATURES}\n\n"}, {"name": "tool_use", "template": with_tools}]
    folder = save(byte_level(), tmp_path, chat_template=named)
    if in_files:  # as transformers writes them since 4.51
        AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "saved")
        folder = tmp_path / "saved"
        assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == with_tools
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "older"}))
    ours = ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder))
    asked = MESSAGES if not tools else MESSAGES[1:]  # this one writes tools alone
    want = AutoTokenizer.from_pretrained(folder).apply_chat_template(asked, tools=list(tools) or None, tokenize=False)
    assert ours.render(asked, tools=tools, add_generation_prompt=False) == want
    ours.close()


@pytest.mark.parametrize(
    ("template", "writes"),
    [
        *((source, True) for source in FAMILIES.values() if "in tools" in source),
        (
            "{% if message['role'] == 'system' and 'tools' in message %}<|tool|>{{ message['tools'] }}{{ m.tools }}{% endif %}",
            False,
        ),
        ("{{ message.tool_calls }}", False),
        ("{%- if tools is not none %}{{ tools | tojson }}{% endif %}", True),
        (None, True),
    ],
)
def test_a_template_writes_the_tools_that_it_is_given(template, writes):
    assert writes_tools(template) == writes


def test_of_named_templates_the_default_is_taken(tmp_path):
    save(byte_level(), tmp_path, chat_template=[{"name": "rag", "template": "t"}, {"name": "default", "template": "d\n"}])
    assert read_template(tmp_path) == "d\n"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "default.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"default\.jinja"):
        read_template(tmp_path)


def test_a_template_that_is_no_text_is_named(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(CheckpointError, match=r"chat_template in .*tokenizer_config\.json is int"):
        read_template(tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{% for x in %}", "is broken in line 1: "),
        ("{{ messages }}\n{% endif %}", "is broken in line 2: "),
        (" \n", "is empty"),
        (None, "cannot be read: No such file or directory; give a file"),
        ("{% generation %}{% break %}{% endgeneration %}{{ raise_exception(strftime_now('')) }}", None),  # of transformers
    ],
)
def test_a_template_that_is_asked_for_is_looked_at_at_once(text, told, tmp_path):
    save(byte_level(), tmp_path)
    file = tmp_path / "asked.jinja"
    if text is not None:
        file.write_text(text)
    tokenizer = Tokenizer.from_folder(tmp_path)
    if told is None:
        assert ChatTemplate.from_folder(tmp_path, tokenizer, file=str(file)).source == text
    else:
        with pytest.raises(ConfigError, match=f"^--chat-template {file} {told}"):
            ChatTemplate.from_folder(tmp_path, tokenizer, file=str(file))


def test_a_byte_order_mark_of_a_template_that_is_asked_for_is_in_no_prompt(tmp_path):
    save(byte_level(), tmp_path)
    file = tmp_path / "asked.jinja"
    file.write_text("hi", encoding="utf-8-sig")
    assert ChatTemplate.from_folder(tmp_path, Tokenizer.from_folder(tmp_path), file=str(file)).source == "hi"


def test_a_model_without_a_template_says_what_to_do(rendered):
    with pytest.raises(RequestError, match="/v1/completions"):
        rendered(None)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for x in", "unexpected|expected|end of template"),
        ("{{ messages[9].content.upper() }}", "no element 9|undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|access to attribute"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ strftime_now.__globals__.x }}", "unsafe|access to attribute"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ nothing() }}", "undefined"),
    ],
)
def test_an_error_of_a_template_is_the_request_s(template, why, rendered):
    with pytest.raises(RequestError, match=why):
        rendered(template)


def test_a_template_that_is_no_jinja_blames_the_template_and_not_the_messages(rendered):
    with pytest.raises(RequestError, match=r"chat template is broken in line 2: unexpected '\}'; correct it"):
        rendered("hi\n{{ messages }")


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 99999999999 }}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{{ '%099999999999d' % 1 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
        "{{ ('a' * 999999).replace('a', 'a' * 999999) | length }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_can_neither_hang_nor_exhaust(template, rendered):
    began = time.perf_counter()
    with pytest.raises(RequestError, match="template"):
        rendered(template, limits=Limits(cpu_s=0.3, memory_bytes=256 << 20, num_chars=1 << 20))
    assert time.perf_counter() - began < 40


def test_after_a_hostile_conversation_the_next_is_rendered():
    limits = Limits(cpu_s=1.5)
    loops = "{% if messages|length > 1 %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    template = ChatTemplate(loops + "fine", variables={}, limits=limits)
    with pytest.raises(RequestError, match=r"1\.5 s"):
        template.render(MESSAGES[1:])
    assert template.render(MESSAGES[1:2]) == "fine"
    template.close()
