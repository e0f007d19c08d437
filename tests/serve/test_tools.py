"""Tools and reasoning of /v1/chat/completions, with parsers of formats that no model has; the fake engine repeats its prompt."""

from __future__ import annotations

import dataclasses

import openai
import pydantic
import pytest
from fake_engine import BY_SEVENS, HELD
from fake_parsers import PARSERS, force_or_json

from enginery.contracts.parsers import ContentText, ToolCallBegun
from enginery.serve.api.answer_parsers import AnswerFormat, AnswerReader, Parsers

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "stop"}},
]
CALL = '[call add {"a": "1 日"}]'
CALLED = {"name": "add", "arguments": '{"a": "1 日"}'}


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def joined(events: list[dict], index: int) -> dict:
    """The message that a client puts together, as OpenAI's does."""
    message: dict = {"content": "", "reasoning_content": "", "calls": {}}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] not in message["calls"]
                    message["calls"][part["index"]] = {
                        "id": part["id"],
                        "type": part["type"],
                        "name": part["function"]["name"],
                        "arguments": "",
                    }
                message["calls"][part["index"]]["arguments"] += part["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message


def test_calls_come_apart_from_the_text(with_server):
    async def scenario(live):
        asked = {"messages": user(f"before {CALL} after [call stop {{}}]"), "tools": TOOLS, "n": 2}
        reply = (await live.post("/v1/chat/completions", **asked)).json()
        for choice in reply["choices"]:
            message = choice["message"]
            assert choice["finish_reason"] == "tool_calls"
            assert message["content"] == "<user>before  after <assistant>"
            first, second = message["tool_calls"]
            assert (first["type"], first["function"]) == ("function", CALLED)
            assert second["function"] == {"name": "stop", "arguments": "{}"}
            assert first["id"].startswith("call_")
        ids = [call["id"] for choice in reply["choices"] for call in choice["message"]["tool_calls"]]
        assert len(set(ids)) == 4

    with_server(scenario, parsers=PARSERS)


def test_a_stream_has_the_same_calls(with_server):
    async def scenario(live):
        asked = {"messages": user(f"(think)why(done)before {CALL} after [call stop {{}}]"), "tools": TOOLS, "n": 2}
        whole = (await live.post("/v1/chat/completions", **asked)).json()
        events = await live.events("/v1/chat/completions", **asked)
        for index in range(2):
            message = whole["choices"][index]["message"]
            streamed = joined(events, index)
            assert streamed["content"] == message["content"] == "<user>before  after <assistant>"
            assert streamed["reasoning_content"] == message["reasoning_content"] == "why"
            assert streamed["finish_reason"] == "tool_calls"
            assert [(call["name"], call["arguments"]) for call in streamed["calls"].values()] == [
                (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
            ]

    with_server(scenario, parsers=PARSERS)


def test_without_tools_the_same_text_is_content(with_server):
    async def scenario(live):
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
            choice = (await live.chat(CALL, **more)).json()["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (f"<user>{CALL}<assistant>", "stop")
            assert "tool_calls" not in choice["message"]

    with_server(scenario, parsers=PARSERS)


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_only_ends_the_answer_and_the_request(with_server, stream):
    async def scenario(live):
        asked = {"messages": user(f"{CALL} {CALL} " + "x " * 60), "tools": TOOLS, "parallel_tool_calls": False, "seed": HELD}
        if stream:
            message = joined(await live.events("/v1/chat/completions", **asked), 0)
            calls, reason, content = message["calls"], message["finish_reason"], message["content"]
        else:
            choice = (await live.post("/v1/chat/completions", **asked)).json()["choices"][0]
            calls, reason, content = choice["message"]["tool_calls"], choice["finish_reason"], choice["message"]["content"]
        assert (len(calls), reason, content) == (1, "tool_calls", "<user>")
        await live.until(lambda: len(live.said("abort")) == 1)

    with_server(scenario, parsers=PARSERS)


def test_what_is_counted_of_an_answer_that_a_call_ends_does_not_depend_on_the_engine_s_steps(with_server):
    async def scenario(live):
        asked = {"messages": user(f"{CALL} {CALL} " + "x " * 60), "tools": TOOLS, "parallel_tool_calls": False, "logprobs": True}
        one, seven = [(await live.post("/v1/chat/completions", **asked, **seed)).json() for seed in ({}, {"seed": BY_SEVENS})]
        assert one["usage"] == seven["usage"]
        assert one["choices"][0]["logprobs"] == seven["choices"][0]["logprobs"]

    with_server(scenario, parsers=dataclasses.replace(PARSERS, reasoning=None))


@pytest.mark.parametrize(("calls_only", "content"), [(True, []), (False, [ContentText("[cal")])])
def test_half_a_tag_at_the_end_is_content_unless_a_call_was_forced(calls_only, content):
    reader = AnswerReader(AnswerFormat(tool_parser=PARSERS.tools, calls_only=calls_only))
    assert reader.feed("[cal", finished=False) == []
    assert reader.feed("", finished=True) == content


def test_a_cut_answer_says_length(with_server):
    async def scenario(live):
        choice = (await live.chat(CALL, tools=TOOLS, max_tokens=8)).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"].startswith("<user>[c")

    with_server(scenario, parsers=PARSERS)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    ("end", "expected", "arguments"), [({"max_tokens": 20}, "length", '{"a":'), ({"stop": "1 "}, "stop", '{"a": "')]
)
def test_an_answer_that_ends_within_a_call_is_not_one_that_calls(with_server, parallel, end, expected, arguments):
    async def scenario(live):
        asked = {"messages": user(CALL), "tools": TOOLS, "parallel_tool_calls": parallel, **end}
        choice = (await live.post("/v1/chat/completions", **asked)).json()["choices"][0]
        streamed = joined(await live.events("/v1/chat/completions", **asked), 0)
        (call,), (streamed_call,) = choice["message"]["tool_calls"], streamed["calls"].values()
        assert call["function"]["arguments"] == streamed_call["arguments"] == arguments
        assert (choice["finish_reason"], streamed["finish_reason"]) == (expected, expected)

    with_server(scenario, parsers=PARSERS)


def test_a_call_that_ends_with_the_last_token_allowed_is_whole(with_server):
    async def scenario(live):
        whole = (await live.chat(CALL, tools=TOOLS, parallel_tool_calls=False)).json()
        num_tokens = whole["usage"]["completion_tokens"]
        last = (await live.chat(CALL, tools=TOOLS, parallel_tool_calls=False, max_tokens=num_tokens)).json()["choices"][0]
        assert last["finish_reason"] == "tool_calls"
        assert last["message"]["tool_calls"][0]["function"] == CALLED
        cut = (await live.chat(CALL, tools=TOOLS, parallel_tool_calls=False, max_tokens=num_tokens - 1)).json()["choices"][0]
        assert cut["finish_reason"] == "length"

    with_server(scenario, parsers=PARSERS)


def test_a_call_is_forced_by_the_parser_s_grammar(with_server):
    async def scenario(live):
        named = {"type": "function", "function": {"name": "stop"}}
        await live.chat("x", tools=TOOLS, tool_choice="required")
        await live.chat("x", tools=TOOLS, tool_choice=named, parallel_tool_calls=False)
        assert live.said("grammar") == ['choice:[["add","stop"],true]', 'choice:["stop",false]']

    with_server(scenario, parsers=PARSERS)


def test_calls_are_restricted_to_allowed_tools_and_the_model_is_told_about_all(with_server, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{% for t in tools %}{{ t.function.name }} {% endfor %}")

    def allowed(mode, *names):
        named = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}

    async def scenario(live):
        for choice in (allowed("required", "stop"), allowed("auto", "stop"), allowed("auto", "stop", "add")):
            reply = await live.chat("x", tools=TOOLS, tool_choice=choice)
            assert reply.json()["choices"][0]["message"]["content"] == "add stop ", reply.text
        assert live.said("grammar") == [
            'choice:[["stop"],true]',
            'choice:[["stop"],true,[null],["(think)","(done)"]]',
            'choice:[["add","stop"],true,[null,null],["(think)","(done)"]]',
        ]
        flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        reply = (await live.post("/v1/responses", input="x", tools=tools, tool_choice=flat)).json()
        assert (reply["tool_choice"], live.said("grammar")[-1]) == (flat, 'choice:[["add"],true]')
        for choice, word in ((allowed("auto", "x"), "'x'"), (allowed("none", "stop"), "'auto'"), (allowed("auto"), "length >= 1")):
            reply = await live.chat("x", tools=TOOLS, tool_choice=choice)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tool_choice"), reply.text
            assert word in reply.json()["error"]["message"]

    with_server(scenario, parsers=PARSERS, chat_template=str(file))


STRICT = {"name": "add", "parameters": {"type": "object", "required": ["a"]}, "strict": True}


def test_calls_of_strict_tools_follow_a_grammar_that_leaves_text_and_reasoning_free(with_server):
    async def scenario(live):
        tools = [{"type": "function", "function": STRICT}, TOOLS[1]]
        for text, more in (("x", {}), ("x (think)", {"tool_choice": "auto", "parallel_tool_calls": False})):
            reply = await live.chat(text, tools=tools, **more)
            assert reply.status_code == 200, reply.text
        message = reply.json()["choices"][0]["message"]
        assert message["reasoning_content"] == "<user>x (think)<assistant>", "the reasoning that the prompt opens stays open"
        schema = '{"type":"object","required":["a"]}'
        assert live.said("grammar") == [
            f'choice:[["add","stop"],true,[{schema},null],["(think)","(done)"]]',
            f'choice:[["add","stop"],false,[{schema},null],["","(done)"]]',
        ]

    with_server(scenario, parsers=PARSERS)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"force": None}, "brackets"),
        ({"force": lambda tools, name, **more: None}, "brackets"),
        ({"tags": ("", "")}, "round"),
    ],
)
def test_strict_is_refused_where_a_parser_cannot_keep_to_it(with_server, change, word):
    tools, reasoning = (
        dataclasses.replace(spec, **{name: value for name, value in change.items() if (name == "force") == (spec.kind == "tools")})
        for spec in (PARSERS.tools, PARSERS.reasoning)
    )

    async def scenario(live):
        asked = {"tools": [{"type": "function", "function": STRICT}]}
        error = (await live.chat("x", **asked)).json()["error"]
        assert error["param"] == "tools"
        assert word in error["message"]
        assert "leave strict out" in error["message"]
        assert (await live.chat("x", **asked, tool_choice="none")).status_code == 200
        assert (await live.chat("x", tools=TOOLS)).status_code == 200

    with_server(scenario, parsers=Parsers(tools=tools, reasoning=reasoning))


SCHEMA = {"type": "object", "required": ["b"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
OR_JSON = Parsers(tools=dataclasses.replace(PARSERS.tools, force_or_json=force_or_json), reasoning=PARSERS.reasoning)


def test_free_tools_and_a_schema_are_one_grammar(with_server):
    async def scenario(live):
        named = {"type": "function", "function": {"name": "stop"}}
        tags, schema = '["(think)","(done)"]', '{"type":"object","required":["b"]}'
        for asked, expected in (
            ({}, f'choice:[["add","stop"],true,[null,null],{tags},{schema}]'),
            ({"parallel_tool_calls": False}, f'choice:[["add","stop"],false,[null,null],{tags},{schema}]'),
            (
                {"tools": [{"type": "function", "function": STRICT}], "tool_choice": "auto"},
                f'choice:[["add"],true,[{{"type":"object","required":["a"]}}],{tags},{schema}]',
            ),
            ({"response_format": {"type": "json_object"}}, f'choice:[["add","stop"],true,[null,null],{tags},{{}}]'),
            ({"response_format": None, "guided_json": SCHEMA}, f'choice:[["add","stop"],true,[null,null],{tags},{schema}]'),
            ({"tool_choice": "none"}, f"json_schema:{schema}"),
            ({"tool_choice": "required"}, f'choice:[["add","stop"],true,{schema}]'),
            ({"tool_choice": named}, f'choice:["stop",true,{schema}]'),
        ):
            reply = await live.chat("x", **{"tools": TOOLS, "response_format": FORMAT, **asked})
            assert (reply.status_code, live.said("grammar")[-1]) == (200, expected), reply.text
        told = {"type": "json_schema", "schema": SCHEMA}
        flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
        reply = await live.post("/v1/responses", input="x", tools=flat, text={"format": {**told, "name": "n"}})
        assert (reply.status_code, live.said("grammar")[-1]) == (200, f'choice:[["add","stop"],true,[null,null],{tags},{schema}]')
        asked = {"max_tokens": 9, "tools": [{"name": "add", "input_schema": {}}], "output_config": {"format": told}}
        reply = await live.post("/v1/messages", messages=user("x"), **asked)
        assert (reply.status_code, live.said("grammar")[-1]) == (200, f'choice:[["add"],true,[null],{tags},{schema}]'), reply.text

    with_server(scenario, parsers=OR_JSON)


def test_reasoning_stays_open_before_a_call_or_json(with_server):
    async def scenario(live):
        for choice, reasoning in (("auto", "<user>x (think)<assistant>"), ("none", "<assistant>"), ("required", "<assistant>")):
            reply = await live.chat("x (think)", tools=TOOLS, response_format=FORMAT, tool_choice=choice)
            assert reply.json()["choices"][0]["message"]["reasoning_content"] == reasoning, choice

    with_server(scenario, parsers=OR_JSON)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"guided_regex": "x"}, "guided_regex"),
        ({"guided_regex": "x", "tool_choice": "required"}, "guided_regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
    ],
)
def test_other_grammars_beside_tools_are_refused(with_server, asked, param):
    async def scenario(live):
        error = (await live.chat("x", tools=TOOLS, **asked)).json()["error"]
        assert error["param"] == param
        assert "brackets has no grammar of calls or a" in error["message"]
        assert "tool_choice none" in error["message"]

    with_server(scenario, parsers=OR_JSON)


@pytest.mark.parametrize(
    ("pieces", "content", "calls"),
    [
        (['{"b": "', CALL, '"}'], f'{{"b": "{CALL}"}}', 0),
        (["(thi", "nk)[1]", CALL, "(done)", f'\n{{"b": "{CALL}"}}'], f'\n{{"b": "{CALL}"}}', 0),
        (["(think)[1](done)", "<", CALL, " {"], "< {", 1),
    ],
)
def test_json_that_quotes_a_call_is_no_call(pieces, content, calls):
    reader = AnswerReader(AnswerFormat(reasoning=PARSERS.reasoning, tool_parser=PARSERS.tools, or_json=True))
    events = [event for piece in pieces for event in reader.feed(piece, finished=False)] + reader.feed("", finished=True)
    assert "".join(event.text for event in events if isinstance(event, ContentText)) == content
    assert sum(isinstance(event, ToolCallBegun) for event in events) == calls
    assert reader.has_called is bool(calls)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_of_a_strict_tool_that_does_not_compile_is_refused_before_the_answer(server_with_parsers, stream):
    bad = {"type": "function", "function": {**STRICT, "parameters": {"BAD": 1}}}
    response = server_with_parsers("/v1/chat/completions", {"messages": user("x"), "tools": [bad], "stream": stream})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools"), response.text


def test_the_official_client_sends_strict_tools(url):
    class Sum(pydantic.BaseModel):
        a: str

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        tool = openai.pydantic_function_tool(Sum, name="add")
        assert tool["function"]["strict"] is True
        asked = {"model": "fake", "messages": user(CALL), "tools": [tool]}
        message = client.chat.completions.parse(**asked).choices[0].message
        assert message.tool_calls[0].function.parsed_arguments == Sum(a="1 日")
        with client.chat.completions.stream(**asked) as stream:
            assert stream.get_final_completion().choices[0].message.tool_calls[0].function.arguments == CALLED["arguments"]


def test_reasoning_that_the_prompt_opens_is_reasoning(with_server):
    async def scenario(live):
        message = (await live.chat("a (done) b (think)")).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "<user>a <assistant>"
        assert message["content"] == " b "

    with_server(scenario, parsers=Parsers(reasoning=PARSERS.reasoning))


def test_tokens_of_reasoning_are_counted(with_server):
    async def scenario(live):
        usage = (await live.chat("(think)one two three(done)x")).json()["usage"]
        counted = usage["completion_tokens_details"]["reasoning_tokens"]
        assert 0 < counted < usage["completion_tokens"]
        none = {"reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        assert (await live.chat("x")).json()["usage"]["completion_tokens_details"] == none

    with_server(scenario, parsers=PARSERS)


def test_logprobs_cover_the_tokens_of_calls_too(with_server):
    async def scenario(live):
        asked = {"messages": user(CALL), "tools": TOOLS, "logprobs": True}
        whole = (await live.post("/v1/chat/completions", **asked)).json()
        events = await live.events("/v1/chat/completions", **asked)
        content = [
            token
            for event in events
            for choice in event["choices"]
            if choice["logprobs"]
            for token in choice["logprobs"]["content"]
        ]
        assert content == whole["choices"][0]["logprobs"]["content"]
        assert len(content) == whole["usage"]["completion_tokens"]

    with_server(scenario, parsers=PARSERS)
