"""/v1/responses, read by the official client; the fake engine repeats its prompt."""

from __future__ import annotations

import json

import openai
import pytest
from fake_engine import BY_SEVENS
from fake_parsers import PARSERS
from openai.types.responses import Response

from enginery.serve.schemas.body_decoding import decode_request
from enginery.serve.schemas.responses import ResponsesRequest

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
USER = [{"role": "user", "content": "hi"}]
CALL = '[call add {"a": "1 日"}]'
ASKED = "(think)why 日(done)before " + CALL + " after"


def checked(reply: dict) -> Response:
    """Strictly what the official client's types say."""
    return Response.model_validate(reply, strict=False)


def test_a_text_is_answered(with_server):
    async def scenario(live):
        reply = (await live.post("/v1/responses", input="hi 😀", instructions="be kind", metadata={"a": "b"})).json()
        response = checked(reply)
        assert (response.status, response.output_text) == ("completed", "<system>be kind<user>hi 😀<assistant>")
        assert (response.instructions, response.metadata, reply["store"]) == ("be kind", {"a": "b"}, False)
        usage = reply["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] // 2
        assert response.temperature == 0.6

    with_server(scenario)


def test_instructions_and_what_a_developer_says_first_are_one_message(with_server):
    """Codex sends both; most templates know no developer, and take one message of the system."""
    says = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be brief"}]}

    async def scenario(live):
        asked = {"instructions": "be kind", "input": [says, {"role": "user", "content": "hi"}]}
        response = checked((await live.post("/v1/responses", **asked)).json())
        assert response.output_text == "<system>be kind\n\nbe brief<user>hi<assistant>"
        chat = (await live.post("/v1/chat/completions", messages=[{"role": "developer", "content": "a"}, *USER])).json()
        assert chat["choices"][0]["message"]["content"] == "<system>a<user>hi<assistant>"

    with_server(scenario)


WITH_LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.mark.parametrize("seed", [None, BY_SEVENS])
@pytest.mark.parametrize("after", [" after", "all"])  # what begins with a letter of the call and comes behind it
@pytest.mark.parametrize("before", ["before ", "one "])
def test_texts_have_the_log_probabilities_of_their_tokens(with_server, before, after, seed):
    async def scenario(live):
        text = f"(think)why 日(done){before}{CALL}{after}"
        reply = (await live.post("/v1/responses", input=text, tools=[ADD], seed=seed, **WITH_LOGPROBS)).json()
        response = checked(reply)
        parts = [item.content[0] for item in response.output if item.type == "message"]
        assert [bytes(byte for each in part.logprobs for byte in each.bytes).decode() for part in parts] == [
            part.text for part in parts
        ]
        tools = [{"type": "function", "function": {name: ADD[name] for name in ("name", "parameters")}}]
        asked = {"messages": [{"role": "user", "content": text}], "tools": tools, "logprobs": True, "top_logprobs": 2}
        chat = (await live.post("/v1/chat/completions", **asked)).json()["choices"][0]["logprobs"]["content"]
        assert all(each in chat for item in reply["output"] if item["type"] == "message" for each in item["content"][0]["logprobs"])
        assert {len(each.top_logprobs) for part in parts for each in part.logprobs} == {2}
        assert response.top_logprobs == 2

    with_server(scenario, parsers=PARSERS)


@pytest.mark.parametrize(
    ("given", "num_top"),
    [({"include": WITH_LOGPROBS["include"]}, 0), ({"top_logprobs": 1}, 1), ({"top_logprobs": 0}, None), ({}, None)],
)
def test_log_probabilities_are_asked_for_by_either_field(given, num_top, shared_server):
    reply = shared_server("/v1/responses", {"input": "x 日", **given}).json()
    logprobs = reply["output"][0]["content"][0]["logprobs"]
    assert {len(each["top_logprobs"]) for each in logprobs} == (set() if num_top is None else {num_top})


def test_a_stream_has_the_log_probabilities_of_each_piece(with_server):
    async def scenario(live):
        asked = {"input": ASKED, "tools": [ADD], **WITH_LOGPROBS}
        client = openai.AsyncOpenAI(base_url=f"{live.http.base_url}/v1", api_key="x", http_client=live.http)
        async with client.responses.stream(model="fake", **asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        told = [event for event in events if event.type == "response.output_text.delta"]
        assert [event.delta for event in told if event.delta.isascii()] == [
            "".join(each.token for each in event.logprobs) for event in told if event.delta.isascii()
        ]
        done = [event for event in events if event.type == "response.output_text.done"]
        for end in done:
            pieces = [each.model_dump() for event in told if event.item_id == end.item_id for each in event.logprobs]
            assert pieces == [each.model_dump() for each in end.logprobs]
        whole = checked((await live.post("/v1/responses", **asked)).json())
        assert [item.content[0].logprobs for item in final.output if item.type == "message"] == [
            item.content[0].logprobs for item in whole.output if item.type == "message"
        ]

    with_server(scenario, parsers=PARSERS)


def test_reasoning_text_and_calls_are_items(with_server):
    async def scenario(live):
        response = checked((await live.post("/v1/responses", input=ASKED, tools=[ADD])).json())
        kinds = [item.type for item in response.output]
        assert kinds == ["message", "reasoning", "message", "function_call", "message"]
        assert response.output[1].content[0].text == "why 日"
        call = response.output[3]
        assert (call.name, json.loads(call.arguments), call.call_id[:5]) == ("add", {"a": "1 日"}, "call_")
        assert response.output_text == "<user>before  after<assistant>"
        assert len({item.id for item in response.output}) == 5

    with_server(scenario, parsers=PARSERS)


def test_a_stream_builds_the_same_response(with_server):
    async def scenario(live):
        whole = (await live.post("/v1/responses", input=ASKED, tools=[ADD])).json()
        events = await live.named_events("/v1/responses", input=ASKED, tools=[ADD])
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        last = events[-1]
        assert last["type"] == "response.completed"
        assert last["response"]["completed_at"] >= last["response"]["created_at"] > 0
        assert checked(last["response"]).completed_at == last["response"]["completed_at"]
        assert [event["response"]["completed_at"] for event in events[:2]] == [None, None]

        def without_ids(value):
            ids = ("id", "item_id", "call_id", "created_at", "completed_at")
            if isinstance(value, dict):
                return {name: without_ids(inner) for name, inner in value.items() if name not in ids}
            return [without_ids(inner) for inner in value] if isinstance(value, list) else value

        assert without_ids(last["response"]) == without_ids(whole)
        for place, item in enumerate(last["response"]["output"]):
            own = [event for event in events if event.get("output_index") == place]
            assert own[0]["type"] == "response.output_item.added"
            assert own[-1] == {**own[-1], "type": "response.output_item.done", "item": item}
            text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert "".join(event["delta"] for event in own if event["type"].endswith(".delta")) == text
            assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}

    with_server(scenario, parsers=PARSERS)


def test_a_cut_answer_is_incomplete(with_server):
    async def scenario(live):
        body = {"input": "one two three four five six", "max_output_tokens": 4}
        response = checked((await live.post("/v1/responses", **body)).json())
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output[0].status == "incomplete"
        assert (await live.named_events("/v1/responses", **body))[-1]["type"] == "response.incomplete"

    with_server(scenario)


def test_a_call_that_the_model_itself_leaves_unfinished_makes_the_response_incomplete(with_server):
    async def scenario(live):
        body = {"input": '[call add {"a":', "tools": [ADD]}
        whole = (await live.post("/v1/responses", **body)).json()
        last = (await live.named_events("/v1/responses", **body))[-1]
        for response in (checked(whole), checked(last["response"])):
            assert (response.status, response.incomplete_details.reason) == ("incomplete", None)
            assert (response.output[-1].type, response.output[-1].status) == ("function_call", "incomplete")

    with_server(scenario, parsers=PARSERS)


@pytest.mark.parametrize("parallel", [True, False])
def test_a_cut_call_makes_the_response_incomplete(with_server, parallel):
    async def scenario(live):
        body = {"input": CALL, "tools": [ADD], "parallel_tool_calls": parallel, "max_output_tokens": 20}
        whole = (await live.post("/v1/responses", **body)).json()
        *_, done, last = await live.named_events("/v1/responses", **body)
        assert (done["type"], done["item"]["status"], last["type"]) == (
            "response.output_item.done",
            "incomplete",
            "response.incomplete",
        )
        for response in (checked(whole), checked(last["response"])):
            assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert response.completed_at is None
            call = response.output[-1]
            assert (call.type, call.status, call.arguments) == ("function_call", "incomplete", '{"a":')

    with_server(scenario, parsers=PARSERS)


def test_a_call_that_a_stop_string_cuts_is_incomplete(with_server):
    """It was told as completed, so that agents would run it with the arguments that there were."""

    async def scenario(live):
        body = {"input": "before " + CALL, "tools": [ADD], "stop": ["日"]}
        whole = (await live.post("/v1/responses", **body)).json()
        *_, done, last = await live.named_events("/v1/responses", **body)
        assert (done["item"]["type"], done["item"]["status"], last["type"]) == (
            "function_call",
            "incomplete",
            "response.incomplete",
        )
        for response in (checked(whole), checked(last["response"])):
            assert (response.status, response.incomplete_details.reason, response.completed_at) == ("incomplete", None, None)
            assert [item.status for item in response.output] == ["completed", "incomplete"]
            assert response.output[-1].arguments == '{"a": "1 '
        for stop in ("before", " after"):  # outside of a call
            response = checked((await live.post("/v1/responses", **body | {"input": ASKED, "stop": [stop]})).json())
            assert (response.status, response.incomplete_details) == ("completed", None)

    with_server(scenario, parsers=PARSERS)


def test_what_fails_later_is_an_event(with_server):
    async def scenario(live):
        last = (await live.named_events("/v1/responses", input="a b c", seed=667))[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert "NaN" in last["response"]["error"]["message"]

    with_server(scenario)


def test_items_of_an_earlier_answer_are_one_message_each(with_server):
    async def scenario(live):
        first = (await live.post("/v1/responses", input=ASKED, tools=[ADD])).json()
        items = [
            {"role": "user", "content": "q"},
            *first["output"][1:4],
            {"type": "function_call_output", "call_id": "c", "output": "2"},
        ]
        from enginery.serve.schemas.body_decoding import decode_request
        from enginery.serve.schemas.responses import ResponsesRequest

        messages = decode_request(json.dumps({"input": items}).encode(), ResponsesRequest).as_chat().messages
        assert [message.role for message in messages] == ["user", "assistant", "tool"]
        _, assistant, result = messages
        assert (assistant.content, assistant.reasoning_content) == ("before ", "why 日")
        assert assistant.tool_calls[0].function.name == "add"
        assert (result.tool_call_id, result.content) == ("c", "2")
        assert (await live.post("/v1/responses", input=items)).status_code == 200

    with_server(scenario, parsers=PARSERS)


def test_reasoning_has_no_encrypted_content_and_comes_back_with_and_without_it(with_server):
    """As Codex and OpenAI's agents ask for it: with each request, as nothing is stored."""

    async def scenario(live):
        asked = {"include": ["reasoning.encrypted_content"], "store": False}
        response = checked((await live.post("/v1/responses", input=ASKED, **asked)).json())
        reasoning = response.output[1]
        assert (reasoning.type, reasoning.content[0].text, reasoning.encrypted_content) == ("reasoning", "why 日", None)
        empty = {"type": "reasoning", "summary": []}
        for item in (reasoning.to_dict(), reasoning.to_dict() | {"encrypted_content": "x"}, empty | {"encrypted_content": "x"}):
            for items in ([item, {"role": "user", "content": "b"}], [{"role": "user", "content": "b"}, item]):
                reply = (await live.post("/v1/responses", input=items, **asked)).json()
                assert reply.get("status") == "completed", reply

    with_server(scenario, parsers=PARSERS)


def test_strict_tools_become_a_grammar_and_others_do_not(with_server):
    async def scenario(live):
        for strict in (True, False, None):
            reply = (await live.post("/v1/responses", input=CALL, tools=[{**ADD, "strict": strict}])).json()
            assert checked(reply).output[1].name == "add"
        assert live.said("grammar") == ['choice:[["add"],true,[{"type":"object"}],["(think)","(done)"]]']
        bad = {**ADD, "strict": True, "parameters": {"BAD": 1}}
        assert (await live.post("/v1/responses", input="x", tools=[bad])).json()["error"]["param"] == "tools"

    with_server(scenario, parsers=PARSERS)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}], ids=["required", "named"])
def test_a_forced_call_that_is_cut_before_its_name_is_no_whole_answer(with_server, choice):
    """A response was told as completed, with nothing in it."""

    async def scenario(live):
        body = {"input": "[call add {}]", "tools": [ADD], "tool_choice": choice}
        chat = {
            "messages": [{"role": "user", "content": body["input"]}],
            "tools": [{"type": "function", "function": {name: ADD[name] for name in ("name", "parameters")}}],
            "tool_choice": choice if isinstance(choice, str) else {"type": "function", "function": {"name": "add"}},
        }
        for limit, reason, why in (({"stop": ["add"]}, "stop", None), ({"max_output_tokens": 9}, "length", "max_output_tokens")):
            whole = (await live.post("/v1/responses", **body, **limit)).json()
            last = (await live.named_events("/v1/responses", **body, **limit))[-1]
            assert last["type"] == "response.incomplete"
            for response in (checked(whole), checked(last["response"])):
                assert (response.status, response.incomplete_details and response.incomplete_details.reason) == ("incomplete", why)
                assert all(item.type != "function_call" for item in response.output)
            limit = {name.replace("max_output", "max"): value for name, value in limit.items()}
            (answer,) = (await live.post("/v1/chat/completions", **chat, **limit)).json()["choices"]
            assert (answer["finish_reason"], "tool_calls" in answer["message"]) == (reason, False)
        whole = (await live.post("/v1/responses", **body, stop=["<assistant>"])).json()
        assert (whole["status"], whole["output"][-1]["name"]) == ("completed", "add")

    with_server(scenario, parsers=PARSERS)


def test_a_format_becomes_a_grammar(with_server):
    async def scenario(live):
        schema = {"type": "object"}
        for format_ in ({"type": "json_object"}, {"type": "json_schema", "name": "n", "schema": schema, "strict": True}):
            assert (await live.post("/v1/responses", input="x", text={"format": format_})).status_code == 200
        assert live.said("grammar") == ["json_object:", 'json_schema:{"type":"object"}']

    with_server(scenario)


def test_what_a_field_within_another_is_refused_for_is_told(shared_server):
    refused = shared_server("/v1/responses", {"input": "x", "text": {"functions": []}}).json()["error"]
    assert (refused["param"], "use tools" in refused["message"]) == ("text", True)


def test_verbosity_goes_to_the_template():
    asked = decode_request(b'{"input": "x", "text": {"verbosity": "low"}}', ResponsesRequest)
    assert (asked.as_chat().verbosity, asked.as_chat().response_format) == ("low", None)


def test_truncation_may_be_auto_and_leaves_nothing_out(shared_server):
    reply = shared_server("/v1/responses", {"input": "x", "truncation": "auto", "text": {"verbosity": "high"}}).json()
    assert checked(reply).truncation == "disabled"
    refused = shared_server("/v1/responses", {"input": "x y " * 900, "truncation": "auto"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "user", "content": "x", "output": "y"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": "x" * 100_000}, "input"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["message.input_image.image_url"]}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"reasoning": {"effort": "some"}}, "reasoning"),
        ({"reasoning": {"budget": 1}}, "reasoning"),
        ({"truncation": "some"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "schema": {"BAD": 1}}}}, "text"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [ADD]}, "tools"),
        ({"temprature": 1}, "temprature"),
        ({"messages": []}, "messages"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_field_is_refused_by_name(shared_server, body, param):
    response = shared_server("/v1/responses", {"input": "x"} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert "max_tokens is" not in response.text, "the message has the field's name in this body"


def test_the_official_client_reads_whole_and_streamed_responses(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "fake", "input": [{"role": "user", "content": ASKED}], "tools": [{**ADD, "strict": True}], "store": False}
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert "".join(texts) == whole.output_text == final.output_text == "<user>before  after<assistant>"
        assert [item.type for item in final.output] == [item.type for item in whole.output]
        again = client.responses.create(model="fake", input=[*asked["input"], *[item.model_dump() for item in whole.output]])
        assert again.status == "completed"
        with pytest.raises(openai.BadRequestError, match="not stored"):
            client.responses.create(model="fake", input="x", previous_response_id="resp_1")
