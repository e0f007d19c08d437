"""Tools and calls as a request gives them: what the chat template and the parser are told, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
from fake_parsers import PARSERS
from serve.test_tools import TOOLS, user

from enginery.plugin.registry import Registry
from enginery.serve.api.answer_parsers import Parsers
from enginery_parsers import register_parsers

HISTORY = [
    {"role": "user", "content": "1+1?"},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "audio": None,
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "index": 0, "function": {"name": "add", "arguments": '{"a": "日"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
]
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}:{{ t.function.description }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.reasoning_content }}{{ m.tool_call_id }}"
    "{% for c in m.tool_calls %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}{{ 'J' + c.function.arguments }}"
    "{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
)


def test_the_template_sees_tools_calls_and_results(folder, with_server):
    async def scenario(live):
        from enginery.text.template import ChatTemplate

        model = live.service.model()
        model.text.template.close()
        object.__setattr__(model.text, "template", ChatTemplate(TEMPLATE, variables={}))
        reply = (await live.post("/v1/chat/completions", messages=HISTORY, tools=TOOLS)).json()
        text = reply["choices"][0]["message"]["content"]
        call = 'c1add{"a": "日"}J{"a": "日"}日'
        assert text == f"[add:Adds.][stop:]<user>1+1?<assistant>hm{call}<tool>2c1"
        model.text.template.close()

    with_server(scenario, parsers=PARSERS)


@pytest.mark.parametrize(
    ("arguments", "text", "keys"),
    [
        ('{"a": "x', '{"a": "x', ["arguments"]),
        ('"{}"', '"{}"', ["arguments"]),
        ("[1]", "[1]", ["arguments"]),
        ('{"a": "\\ud83d"}', '{"a": "\\ud83d"}', ["arguments"]),
        ('{"a": 1%s}' % ("0" * 24), '{"a": 1%s}' % ("0" * 24), ["a"]),
        ({"a": "日"}, '{"a": "日"}', ["a"]),
        ("", "{}", []),
        (" ", "{}", []),
        ("null", "{}", []),
        (None, "{}", []),
    ],
)  # fmt: skip
def test_a_conversation_goes_on_whatever_a_model_wrote_as_arguments(with_server, arguments, text, keys, tmp_path):
    """Templates put arguments into a text, write them as JSON, or go through what they have."""
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for m in messages %}{% for c in m.tool_calls %}{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}"
        ";{{ ('' + a) }};{{ a }};{{ a | items | map('first') | list }};{{ a.keys() | list }}{% endfor %}{% endfor %}"
    )
    function = {"name": "add", "arguments": arguments}
    call = {"type": "tool_use", "id": "c", "name": "add", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "no"}

    async def scenario(live):
        want = ";".join([text, text, text, str(keys), str(keys)])
        history = [*user("x"), {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}]
        reply = (await live.post("/v1/chat/completions", messages=[*history, {"role": "tool", "content": "no"}])).json()
        assert reply["choices"][0]["message"]["content"] == want
        turns = [*user("x"), {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        assert (await live.post("/v1/messages", messages=turns, max_tokens=150)).json()["content"][0]["text"] == want
        items = [
            {"type": "function_call", "call_id": "c", **function},
            {"type": "function_call_output", "call_id": "c", "output": ""},
        ]
        if arguments is not None:
            items[0] |= function
            items[1] |= {"output": ""}
            output = (await live.post("/v1/responses", input=items)).json()["output"]
            assert output[0]["content"][0]["text"] == want

    with_server(scenario, chat_template=str(file))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": TOOLS * 200}, "tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"BAD": 1}, "strict": True}}]}, "tools"),
        ({"functions": []}, "functions"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": HISTORY[1]["tool_calls"]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}, "messages"),
        ({"messages": [{"role": "tool", "tool_call_id": "y"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages"),
    ],
    ids=lambda value: json.dumps(value)[:70],
)
def test_wrong_tools_are_refused_by_name(server_with_parsers, body, param):
    response = server_with_parsers("/v1/chat/completions", {"messages": user("x")} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_tools_need_a_parser_unless_none_may_be_called(shared_server):
    body = {"messages": user("x"), "tools": TOOLS}
    response = shared_server("/v1/chat/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert "--tool-parser" in response.json()["error"]["message"]
    assert shared_server("/v1/chat/completions", {**body, "tool_choice": "none"}).status_code == 200


def test_who_sends_tools_without_a_parser_is_told_which_there_are(with_server, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["AnyForCausalLM"]}')
    text = SimpleNamespace(template=SimpleNamespace(source=""), tokenizer=SimpleNamespace(added_tokens=frozenset()))
    parsers = Parsers.choose(Registry.load(), tmp_path, text, tools="none", reasoning="none")

    async def scenario(live):
        error = (await live.post("/v1/chat/completions", messages=user("x"), tools=TOOLS)).json()["error"]
        assert "; there are deepseek-v3, deepseek-v3.1, " in error["message"]
        assert "hermes" in error["message"]
        assert "think" not in error["message"], "that one is of reasoning"

    with_server(scenario, parsers=parsers)


@pytest.mark.parametrize("parameters", [None, {}])
def test_a_template_that_needs_what_a_tool_leaves_out_gets_what_that_stands_for(with_server, parameters, tmp_path):
    """Descriptions and parameters may be left out, which the template of gpt-oss does not know."""
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% if messages[0].content == 'never' %}{{ raise_exception('never') }}{% endif %}"
        "{% for t in tools %}{{ '//' + t.function.description }}{{ t.function.parameters | tojson }}{% endfor %}"
    )
    bare = {"type": "function", "function": {"name": "stop"} | ({} if parameters is None else {"parameters": parameters})}

    async def scenario(live):
        asked = {"tools": [bare], "max_tokens": 200}
        reply = (await live.post("/v1/chat/completions", messages=user("x"), **asked)).json()
        schema = {"type": "object", "properties": {}, "additionalProperties": False} if parameters is None else parameters
        assert reply["choices"][0]["message"]["content"] == "//" + json.dumps(schema)
        refused = await live.post("/v1/chat/completions", messages=user("never"), **asked)
        assert (refused.status_code, "never" in refused.json()["error"]["message"]) == (400, True)

    with_server(scenario, parsers=PARSERS, chat_template=str(file))


def test_a_template_that_wants_one_call_a_message_gets_several_one_after_another(with_server, tmp_path):
    """As Llama 3's, whose models write several at times. What is wrong else is still told."""
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}{{ c.id }}{% endfor %}{{ m.tool_call_id }}{% endfor %}{{ tools }}"
    )
    calls = [{"id": name, "type": "function", "function": {"name": "add", "arguments": "{}"}} for name in ("a", "b", "c")]
    said = {"role": "assistant", "content": "so", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": name, "content": name.upper()} for name in ("b", "a")]

    async def scenario(live):
        asked = {"tools": TOOLS, "tool_choice": "none", "max_tokens": 200}
        told = (await live.post("/v1/chat/completions", messages=[*user("x"), said, *results, *user("y")], **asked)).json()
        wanted = "<user>x<assistant>soa<tool>Aa<assistant>b<tool>Bb<assistant>c<user>y"
        assert told["choices"][0]["message"]["content"].startswith(wanted)
        twice = await live.post("/v1/chat/completions", messages=[*user("x"), said, results[0], results[0]], **asked)
        assert (twice.status_code, "one call" in twice.json()["error"]["message"]) == (400, True)

    with_server(scenario, parsers=PARSERS, chat_template=str(file))


def test_a_template_that_needs_the_content_of_a_call_gets_an_empty_one(with_server, tmp_path):
    """Clients send null there, and what a template puts to a text is then no text."""
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}{{ tools }}"
    )

    async def scenario(live):
        reply = (await live.post("/v1/chat/completions", messages=HISTORY)).json()
        assert reply["choices"][0]["message"]["content"] == "<user>1+1?<assistant>add<tool>2None"
        thought = [*user("x"), {"role": "assistant", "content": None, "reasoning_content": "hm"}]
        reply = (await live.post("/v1/chat/completions", messages=thought)).json()
        assert reply["choices"][0]["message"]["content"] == "<user>x<assistant>None", "an answer that was cut in its reasoning"

    with_server(scenario, parsers=PARSERS, chat_template=str(file))


def test_tools_are_told_alike_whether_a_call_has_content_or_not(with_server, tmp_path):
    """Otherwise an agent's model is told anew of its tools behind the first call, and no prefix of the prompt is known."""
    file = tmp_path / "template.jinja"
    file.write_text("{{ tools | tojson }}{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}")
    bare = {"type": "function", "function": {"name": "stop"}}
    full = {"type": "function", "function": {"name": "go", "description": "Goes.", "parameters": {"type": "object"}}}

    async def scenario(live):
        for messages in (user("x"), HISTORY):
            asked = {"messages": messages, "tools": [bare, full], "max_tokens": 300}
            text = (await live.post("/v1/chat/completions", **asked)).json()["choices"][0]["message"]["content"]
            assert text.startswith(json.dumps([bare, full])), text

    with_server(scenario, parsers=PARSERS, chat_template=str(file))


def test_content_beside_a_call_stays_content_where_another_call_has_none(with_server, tmp_path):
    """A template that needs content takes thoughts and content together, so nothing is moved for it."""
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '|' }}{{ m.reasoning_content }}{% endfor %}{{ tools }}"
    )
    messages = [*HISTORY, HISTORY[1] | {"content": "I add."}, HISTORY[2] | {"tool_call_id": "c2"}]

    async def scenario(live):
        asked = {"messages": messages, "tools": TOOLS, "tool_choice": "none", "max_tokens": 200}
        text = (await live.post("/v1/chat/completions", **asked)).json()["choices"][0]["message"]["content"]
        assert text.startswith("<user>1+1?|<assistant>|hm<tool>2|<assistant>I add.|hm<tool>2|")

    with_server(scenario, parsers=PARSERS, chat_template=str(file))


@pytest.mark.parametrize("is_described", [True, False])
def test_a_template_that_takes_thoughts_or_content_with_calls_gets_both_as_thoughts(with_server, is_described, tmp_path):
    """gpt-oss' takes one of them, and the engine's own answers have both, where a commentary stands before the call."""
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('one of both') }}{% endif %}"
        "{{ '<' + m.role + '>' + (m.thinking or '') + '|' + m.content }}{% endfor %}"
        "{% for t in tools %}{{ '//' + t.function.description }}{% endfor %}"
    )
    tool = {"type": "function", "function": {"name": "add"} | ({"description": "Adds."} if is_described else {})}
    messages = [HISTORY[0], HISTORY[1] | {"content": "I add."}, HISTORY[2]]

    async def scenario(live):
        asked = {"messages": messages, "tools": [tool], "max_tokens": 200}
        text = (await live.post("/v1/chat/completions", **asked)).json()["choices"][0]["message"]["content"]
        assert text == f"<user>|1+1?<assistant>hm\n\nI add.|<tool>|2//{'Adds.' if is_described else ''}"

    with_server(scenario, parsers=PARSERS, chat_template=str(file))


PHI4_MINI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)


@pytest.mark.parametrize("arguments", ['{"a": "日"}', {"a": "日"}])
@pytest.mark.parametrize("role", ["system", "developer", None])
def test_phi_4_mini_is_told_of_tools_within_the_message_of_the_system(role, arguments, with_server, tmp_path):
    """As its card writes them. The template leaves calls out, so that they are written as the model writes them."""
    file = tmp_path / "template.jinja"
    file.write_text(PHI4_MINI)
    tool = {"type": "function", "function": {"name": "add", "description": "日", "parameters": {"a": {"type": "str"}}}}
    begun = [{"role": role, "content": "Be brief."}] if role else []
    offered = '<|tool|>[{"name": "add", "description": "日", "parameters": {"a": {"type": "str"}}}]<|/tool|>'
    made = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [*begun, HISTORY[0], HISTORY[1] | {"tool_calls": [made]}, HISTORY[2]]
    call = '<|tool_call|>[{"name": "add", "arguments": {"a": "日"}}]<|/tool_call|>'
    said = f"<|user|>1+1?<|end|><|assistant|>{call}<|end|><|tool|>2<|end|><|assistant|>"

    async def scenario(live):
        async def rendered(**asked):
            ids = (await live.post("/tokenize", messages=messages, **asked)).json()["tokens"]
            return (await live.post("/detokenize", tokens=ids)).json()["prompt"]

        system = "Be brief." if role else ""
        assert await rendered(tools=[tool]) == f"<|system|>{system}{offered}<|end|>{said}"
        assert await rendered() == (f"<|system|>{system}<|end|>{said}" if role else said)
        asked = {"messages": messages, "tools": [tool]}
        assert (await live.post("/v1/chat/completions", **asked)).status_code == 200

    with_server(scenario, parsers=told_by("phi4-mini"), chat_template=str(file))


MINIMAX_TEXT = (
    "{% for message in messages %}{% if message['role'] in ('system', 'user') %}<{{ message['role'] }}>"
    "{{ message['content'][0]['text'] }}{% elif message['role'] == 'assistant' %}<ai>"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
    "{% elif message['role'] == 'function' %}<function_response>{{ message['name'] }}: {{ message['content'][0]['text'] }}"
    "{% endif %}{% endfor %}{% for tool in tools or [] %}<function_setting>{{ tool.function.name }}{% endfor %}"
)


def test_minimax_text_is_told_of_calls_within_the_content_and_of_results_as_functions(with_server, tmp_path):
    """Its template knows neither calls nor the role tool, so that both were left out."""
    file = tmp_path / "template.jinja"
    file.write_text(MINIMAX_TEXT)
    functions = [("add", '{"a": "{日}"}'), ("sub", {"b": 1}), ("add", None)]
    calls = [
        {"id": f"c{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(functions)
    ]
    results = [{"role": "tool", "content": f"{{{place}}}", "tool_call_id": f"c{place}"} for place in (1, 0)]
    messages = [HISTORY[0], {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    told = [f"<function_call>```typescript\nfunctions.{call}\n```" for call in ('add({"a": "{日}"})', 'sub({"b": 1})', "add({})")]

    async def scenario(live):
        ids = (await live.post("/tokenize", messages=messages, tools=TOOLS)).json()["tokens"]
        prompt = (await live.post("/detokenize", tokens=ids)).json()["prompt"]
        history = f"<user>1+1?<ai>{''.join(told)}<function_response>sub: {{1}}<function_response>add: {{0}}"
        assert prompt == history + "".join(f"<function_setting>{tool['function']['name']}" for tool in TOOLS)

    with_server(scenario, parsers=told_by("minimax-text"), chat_template=str(file))


def told_by(name):
    (spec,) = (spec for spec in register_parsers() if spec.name == name)
    return dataclasses.replace(PARSERS, tools=dataclasses.replace(PARSERS.tools, tell=spec.tell))


def test_tools_that_the_template_does_not_write_are_refused_unless_a_call_is_forced(with_server, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}{{ messages[0].tool_calls }}")

    async def scenario(live):
        asked = {"messages": user("[call stop {}]"), "tools": TOOLS}
        for choice, status in ((None, 400), ("auto", 400), ("none", 200), ("required", 200)):
            reply = await live.post("/v1/chat/completions", **asked, tool_choice=choice)
            assert reply.status_code == status, choice
            if status == 400:
                assert reply.json()["error"]["param"] == "tools"
                assert "does not write tools" in reply.json()["error"]["message"]

    with_server(scenario, parsers=PARSERS, chat_template=str(file))


def test_a_tool_without_parameters_has_none(with_server, monkeypatch):
    seen = []
    force = PARSERS.tools.force
    tools = dataclasses.replace(PARSERS.tools, force=lambda tools, *rest, **more: seen.extend(tools) or force(tools, *rest, **more))

    async def scenario(live):
        await live.post("/v1/chat/completions", messages=user("x"), tools=TOOLS, tool_choice="required")
        assert [tool.parameters.get("additionalProperties") for tool in seen] == [None, False]

    with_server(scenario, parsers=dataclasses.replace(PARSERS, tools=tools))
