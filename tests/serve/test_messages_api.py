"""/v1/messages, read by Anthropic's official client; the fake engine repeats its prompt."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest
from fake_parsers import PARSERS

if TYPE_CHECKING:  # it takes a second, and each worker collects all tests
    from anthropic.types import Message

ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
CALL = '[call add {"a": "1 日"}]'
ASKED = "(think)why 日(done)before " + CALL + " after"

UNKNOWN_TOOL = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference", "tool_name": "x"}]}


def as_message(reply: dict) -> Message:
    """As the official client reads it."""
    from anthropic.types import Message

    return Message.model_validate(reply)


def user(text: str) -> dict:
    return {"max_tokens": 200, "messages": [{"role": "user", "content": text}]}


def test_a_message_is_answered(with_server):
    async def scenario(live):
        body = user("hi 😀") | {"system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]}
        reply = (await live.post("/v1/messages", **body)).json()
        message = as_message(reply)
        assert [block.text for block in message.content] == ["<system>be kind<user>hi 😀<assistant>"]
        assert (message.role, message.stop_reason, message.stop_sequence, message.model) == ("assistant", "end_turn", None, "fake")
        usage = message.usage
        counted = (await live.post("/v1/messages/count_tokens", messages=body["messages"], system=body["system"])).json()
        assert usage.input_tokens + usage.cache_read_input_tokens == counted["input_tokens"]

    with_server(scenario)


@pytest.mark.parametrize("content", ["I say", [{"type": "text", "text": "I say"}]])
def test_an_assistant_s_last_message_is_the_beginning_of_the_answer(with_server, content):
    async def scenario(live):
        body = user("hi")
        begun = [*body["messages"], {"role": "assistant", "content": content}]
        reply = as_message((await live.post("/v1/messages", **body | {"messages": begun})).json())
        assert [block.text for block in reply.content] == ["<user>hi<assistant>I say"]  # the fake engine repeats its prompt
        called = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {}}]}
        answered = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]}
        for last in ([called], [called, answered], [{"role": "assistant", "content": ""}]):
            reply = await live.post("/v1/messages", **body | {"messages": [*body["messages"], *last]})
            assert as_message(reply.json()).content[0].text.endswith("<assistant>"), reply.text

    with_server(scenario)


def test_thinking_text_and_calls_are_blocks(with_server):
    async def scenario(live):
        message = as_message((await live.post("/v1/messages", **user(ASKED), tools=[ADD])).json())
        assert [block.type for block in message.content] == ["text", "thinking", "text", "tool_use", "text"]
        assert message.content[1].thinking == "why 日"
        assert (message.content[3].name, message.content[3].input) == ("add", {"a": "1 日"})
        assert message.stop_reason == "tool_use"

    with_server(scenario, parsers=PARSERS)


def test_a_strict_tool_has_its_schema_followed(with_server):
    async def scenario(live):
        tools = [{**ADD, "input_schema": {"type": "object", "required": ["a"]}, "strict": True}]
        assert (await live.post("/v1/messages", **user("x"), tools=tools)).status_code == 200
        assert [grammar for grammar in live.said("grammar") if '"required":["a"]' in grammar]

    with_server(scenario, parsers=PARSERS)


def test_how_an_answer_ended_is_told(with_server):
    async def scenario(live):
        for stream in (False, True):
            for more, expected in (
                ({"stop_sequences": ["wo th"]}, ("stop_sequence", "wo th", "<user>one t")),
                ({"max_tokens": 3}, ("max_tokens", None, None)),
            ):
                body = user("one two three") | more
                if stream:
                    events = await live.named_events("/v1/messages", **body)
                    end = next(event["delta"] for event in events if event["type"] == "message_delta")
                    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
                else:
                    end = (await live.post("/v1/messages", **body)).json()
                    text = end["content"][0]["text"]
                assert (end["stop_reason"], end["stop_sequence"], expected[2] and text) == expected

    with_server(scenario)


@pytest.mark.parametrize("alone", [True, False])
def test_a_cut_call_ends_with_max_tokens(with_server, alone):
    async def scenario(live):
        choice = {"type": "auto", "disable_parallel_tool_use": alone}
        body = user(CALL) | {"tools": [ADD], "tool_choice": choice, "max_tokens": 20}
        whole = (await live.post("/v1/messages", **body)).json()
        events = await live.named_events("/v1/messages", **body)
        end = next(event["delta"] for event in events if event["type"] == "message_delta")
        assert whole["content"][-1]["type"] == "tool_use"
        assert (whole["stop_reason"], end["stop_reason"]) == ("max_tokens", "max_tokens")

    with_server(scenario, parsers=PARSERS)


def test_what_fails_later_is_an_error_event(with_server):
    async def scenario(live):
        from enginery.serve.schemas import anthropic as anthropic_schemas

        asked = anthropic_schemas.MessagesRequest.as_chat
        try:
            anthropic_schemas.MessagesRequest.as_chat = lambda self: msgspec.structs.replace(asked(self), seed=667)
            *_, last = await live.named_events("/v1/messages", **user("a b c"))
        finally:
            anthropic_schemas.MessagesRequest.as_chat = asked
        assert last == {"type": "error", "error": {"type": "api_error", "message": "the logits were NaN"}}

    with_server(scenario)


def test_a_forced_call_that_is_cut_before_its_name_says_so(with_server):
    async def scenario(live):
        body = user("[call add {}]") | {"tools": [ADD], "tool_choice": {"type": "any"}}
        for limit, end in (({"stop_sequences": ["add"]}, ("stop_sequence", "add")), ({"max_tokens": 9}, ("max_tokens", None))):
            message = as_message((await live.post("/v1/messages", **body | limit)).json())
            assert (message.stop_reason, message.stop_sequence) == end
            assert "tool_use" not in [block.type for block in message.content]

    with_server(scenario, parsers=PARSERS)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [UNKNOWN_TOOL]}]}, "messages: a tool_reference names 'x'"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "between_tools"}}, "thinking"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"speed": "fast"}, "speed"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"BAD": 1}}}}, "output_config"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tools": [ADD]}, "tools"),
        ({"top_k": -5}, "top_k"),
        ({"n": 2}, "n"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_field_is_refused_in_anthropic_s_shape(shared_server, body, words):
    response = shared_server("/v1/messages", user("x") | body)
    error = response.json()
    assert (response.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error"), error
    assert error["error"]["message"].startswith(words if ": " in words else f"{words}: ")


def test_a_thread_is_refused_so_that_clients_go_on_without_one(shared_server):
    error = shared_server("/v1/messages?beta=true", user("x") | {"thread": {"type": "create"}}).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert "details" not in shared_server("/v1/messages", user("x") | {"n": 1}).json()["error"]


USES, THOUGHTS = "clear_tool_uses_20250919", "clear_thinking_20251015"


def called(number: int) -> list[dict]:
    """A thought, a call, and its long result."""
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    call = {"type": "tool_use", "id": f"t{number}", "name": "add", "input": {"a": number}}
    result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": f"result {number} " + "word " * 20}
    return [{"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [result]}]


def turns(*, of_calls: int) -> list[dict]:
    return user("q")["messages"] + [turn for number in range(1, of_calls + 1) for turn in called(number)]


def counted_by(kind: str, value: int) -> dict:
    return {"type": kind, "value": value}


@pytest.mark.parametrize(
    ("edit", "kept"),
    [
        ({"trigger": counted_by("tool_uses", 3), "keep": counted_by("tool_uses", 1)}, [4]),
        ({"trigger": counted_by("tool_uses", 3), "keep": counted_by("tool_uses", 0)}, []),
        ({"trigger": counted_by("tool_uses", 4)}, [1, 2, 3, 4]),
        ({"trigger": counted_by("input_tokens", 20)}, [2, 3, 4]),
        ({}, [1, 2, 3, 4]),
        ({"trigger": counted_by("tool_uses", 1), "exclude_tools": ["add"]}, [1, 2, 3, 4]),
        ({"trigger": counted_by("tool_uses", 1), "clear_at_least": counted_by("input_tokens", 1000)}, [1, 2, 3, 4]),
    ],
    ids=str,
)
def test_old_results_of_calls_are_left_out_when_that_is_asked_for(with_server, edit, kept):
    async def scenario(live):
        body = {"messages": turns(of_calls=4), "context_management": {"edits": [{"type": USES, **edit}]}}
        reply = (await live.post("/v1/messages", **body, max_tokens=1000)).json()
        text = reply["content"][0]["text"]
        assert [number for number in range(1, 5) if f"result {number}" in text] == kept
        applied = reply["context_management"]["applied_edits"]
        events = await live.named_events("/v1/messages", **body, max_tokens=1000)
        assert next(event for event in events if event["type"] == "message_delta")["context_management"]["applied_edits"] == applied
        counted = (await live.post("/v1/messages/count_tokens", **body)).json()
        num_cleared = counted["context_management"]["original_input_tokens"] - counted["input_tokens"]
        if len(kept) == 4:
            assert (applied, num_cleared) == ([], 0)
        else:
            assert num_cleared > 0
            assert applied == [{"type": USES, "cleared_tool_uses": 4 - len(kept), "cleared_input_tokens": num_cleared}]

    with_server(scenario, max_model_len=2048)


def test_results_that_are_left_out_already_count_no_more(with_server):
    from enginery.serve.api.context_edits import edit_context
    from enginery.serve.schemas.anthropic import MessagesRequest
    from enginery.serve.schemas.body_decoding import decode_request

    async def scenario(live):
        edit = {"type": USES, "trigger": counted_by("tool_uses", 3), "keep": counted_by("tool_uses", 1)}
        body = {"max_tokens": 5, "messages": turns(of_calls=4), "context_management": {"edits": [edit]}}
        request = decode_request(json.dumps(body).encode(), MessagesRequest)
        once, applied = await edit_context(live.service.model(), request)
        assert [each["cleared_tool_uses"] for each in applied] == [3]
        assert await edit_context(live.service.model(), once) == (once, [])

    with_server(scenario, max_model_len=2048)


def test_arguments_and_thinking_are_left_out_when_that_is_asked_for(with_server):
    from enginery.serve.api.context_edits import edit_context
    from enginery.serve.schemas.anthropic import MessagesRequest
    from enginery.serve.schemas.body_decoding import decode_request

    async def edited(live, *edits):
        body = {"max_tokens": 5, "messages": turns(of_calls=4), "context_management": {"edits": edits}}
        request = decode_request(json.dumps(body).encode(), MessagesRequest)
        found, applied = await edit_context(live.service.model(), request)
        chat = [message for message in found.as_chat().messages if message.role == "assistant"]
        inputs = [message.tool_calls[0].for_template()["function"]["arguments"] for message in chat]
        return inputs, [message.reasoning_content for message in chat], applied

    async def scenario(live):
        uses = {"type": USES, "trigger": counted_by("tool_uses", 1), "keep": counted_by("tool_uses", 2)}
        whole = [{"a": number} for number in range(1, 5)]
        for inputs, expected in ((True, [{}, {}, *whole[2:]]), (["add"], [{}, {}, *whole[2:]]), (["other"], whole), (False, whole)):
            assert (await edited(live, {**uses, "clear_tool_inputs": inputs}))[0] == expected
        for keep, expected in (
            (None, [None, None, None, "hm"]),
            (counted_by("thinking_turns", 3), [None, "hm", "hm", "hm"]),
            ("all", ["hm"] * 4),
            ({"type": "all"}, ["hm"] * 4),
        ):
            _, thoughts, applied = await edited(live, {"type": THOUGHTS} if keep is None else {"type": THOUGHTS, "keep": keep})
            assert thoughts == expected
            assert [each["cleared_thinking_turns"] for each in applied] == [expected.count(None)] * (None in expected)
        assert len((await edited(live, uses, {"type": THOUGHTS}))[2]) == 2

    with_server(scenario)


def test_thinking_that_is_not_to_be_shown_is_left_out_of_the_answer(with_server):
    async def scenario(live):
        for display, shown in (("omitted", ""), ("summarized", "why 日")):
            body = user(ASKED) | {"thinking": {"type": "adaptive", "display": display}}
            message = as_message((await live.post("/v1/messages", **body)).json())
            assert [block.thinking for block in message.content if block.type == "thinking"] == [shown]
            events = await live.named_events("/v1/messages", **body)
            assert (
                "".join(event["delta"].get("thinking", "") for event in events if event["type"] == "content_block_delta") == shown
            )

    with_server(scenario, parsers=PARSERS)


def test_other_errors_have_that_shape_too(shared_server):
    assert shared_server("/v1/messages", user("x") | {"model": "gpt-9"}).json()["error"]["type"] == "not_found_error"
    assert shared_server("/v1/messages/nothing", {}).json()["error"]["type"] == "not_found_error"
    assert shared_server("/v1/messages", b"{").json()["error"]["type"] == "invalid_request_error"


def test_the_official_client_reads_the_models(url):
    import anthropic
    from anthropic.types import ModelInfo

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        page = client.models.list(limit=1)
        (listed,) = page
        assert (page.first_id, page.last_id, page.has_next_page()) == ("fake", "fake", False)
        for model in (listed, client.models.retrieve("fake")):
            ModelInfo.model_validate(model.model_dump(), strict=True)
            assert (model.type, model.id, model.display_name, model.lifecycle) == ("model", "fake", "fake", "active")
            assert (model.max_input_tokens, model.created_at.timestamp()) == (512, model.model_extra["created"])
        with pytest.raises(anthropic.NotFoundError, match="is not served here"):
            client.models.retrieve("other")


def test_the_official_client_reads_whole_and_streamed_messages(url):
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        asked = {"model": "fake", "max_tokens": 300, "messages": [{"role": "user", "content": ASKED}], "tools": [ADD]}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == "".join(block.text for block in whole.content if block.type == "text") == "<user>before  after<assistant>"
        kept = [block.model_dump(exclude={"id"}) for block in whole.content]
        assert [block.model_dump(exclude={"id"}) for block in final.content] == kept
        assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
        results = [{"type": "tool_result", "tool_use_id": "x", "content": "2"}]
        history = [*asked["messages"], {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
        assert client.messages.create(model="fake", max_tokens=20, messages=history).stop_reason == "max_tokens"
        assert client.messages.count_tokens(model="fake", messages=asked["messages"]).input_tokens > 10
        with pytest.raises(anthropic.BadRequestError, match="top_p"):
            client.messages.create(model="fake", max_tokens=5, messages=asked["messages"], extra_body={"top_p": 3})
