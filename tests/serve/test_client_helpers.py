"""The helpers of the official clients, LangChain and LiteLLM, over models that write noise within grammars, and the fake engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import noise
import openai
import pydantic
import pytest
from pairwise import EVERYTHING
from running import PATIENCE_S, serving

if TYPE_CHECKING:  # it takes a second, and each worker collects all tests
    import anthropic

ASK = [{"role": "user", "content": "x"}]
CALL = '[call add {"a": 1}]'


class Weather(pydantic.BaseModel, extra="forbid"):
    """What is asked of noise, in few words: without extra="forbid" it may name a member without end."""

    sky: Literal["clear", "cloudy"]
    warm: bool


@pytest.fixture(scope="module")
def noisy() -> Iterator[str]:
    """URL of a server whose model writes noise, if nothing forbids it."""
    with serving(*noise.FLAGS, "--tool-parser", "hermes", "--served-model-name", "noise") as address:
        yield address


@pytest.fixture(scope="module")
def claude(noisy: str) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=noisy, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(noisy: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{noisy}/v1", api_key="none", max_retries=0) as client:
        yield client


# anthropic


def test_anthropic_messages_parse(claude):
    import anthropic

    asked = {"model": "noise", "max_tokens": 1000, "messages": ASK, "output_format": Weather}
    message = claude.messages.parse(**asked)
    assert isinstance(message.parsed_output, Weather)
    assert isinstance(claude.beta.messages.parse(**asked).parsed_output, Weather)
    again = [*ASK, {"role": "assistant", "content": message.content}, *ASK]
    assert isinstance(claude.messages.parse(**asked | {"messages": again}).parsed_output, Weather)
    wrong = {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}
    with pytest.raises(anthropic.BadRequestError, match="output_config: "):
        claude.messages.create(model="noise", max_tokens=20, messages=ASK, output_config=wrong)


def test_anthropic_messages_stream_with_a_schema(claude):
    for messages in (claude.messages, claude.beta.messages):
        with messages.stream(model="noise", max_tokens=1000, messages=ASK, output_format=Weather) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert final.parsed_output == Weather.model_validate_json(text)


def test_anthropic_tool_runner_runs_a_tool_that_the_model_calls(claude):
    import anthropic

    ran = []

    @anthropic.beta_tool
    def look_up(sky: Literal["clear", "cloudy"], warm: bool) -> str:
        """Look a day up.

        Args:
            sky: How it was.
            warm: Whether it was.
        """
        ran.append((sky, warm))
        return "Tuesday"

    asked = {"model": "noise", "max_tokens": 1000, "messages": ASK, "tools": [look_up], "max_iterations": 2}
    for more in ({}, {"thread": False}, {"stream": True}):
        ran.clear()
        runner = claude.beta.messages.tool_runner(**asked, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **more)
        if more.get("stream"):
            final = [stream.get_final_message() for stream in runner][-1]
        else:
            final = runner.until_done()
        assert final.stop_reason == "tool_use"
        assert len(ran) == 2
        assert ran[0][0] in ("clear", "cloudy")


def test_anthropic_s_other_fields_are_accepted(claude):
    cached = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
    message = claude.beta.messages.create(
        model="noise",
        max_tokens=20,
        betas=["context-management-2025-06-27", "interleaved-thinking-2025-05-14"],
        cache_control=cached,
        system=[{"type": "text", "text": "s", "cache_control": cached}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "q", "cache_control": cached}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "t", "name": "f", "input": {}, "cache_control": cached, "caller": {"type": "direct"}}
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t",
                        "cache_control": cached,
                        "content": [
                            {"type": "text", "text": "r", "cache_control": cached},
                            {"type": "tool_reference", "tool_name": "g", "cache_control": cached},
                        ],
                    }
                ],
            },
            {"role": "system", "content": [{"type": "text", "text": "be brief", "cache_control": cached}]},
        ],
        tools=[
            {
                "name": "f",
                "input_schema": {"type": "object"},
                "cache_control": cached,
                "eager_input_streaming": True,
                "defer_loading": False,
                "allowed_callers": ["direct"],
            },
            {"name": "g", "input_schema": {"type": "object"}, "defer_loading": True},
        ],
        thinking={"type": "adaptive", "display": "summarized"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "low"},
        service_tier="auto",
        speed="standard",
    )
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert message.context_management.applied_edits == []
    counted = claude.beta.messages.count_tokens(
        model="noise", messages=ASK, thinking={"type": "enabled", "budget_tokens": 1024}, context_management={"edits": []}
    )
    assert counted.context_management.original_input_tokens == counted.input_tokens > 0


# openai


def test_openai_chat_parse_and_stream(gpt):
    asked = {"model": "noise", "messages": ASK, "response_format": Weather, "max_tokens": 1000}
    parsed = gpt.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(parsed, Weather)
    with gpt.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message
    assert isinstance(final.parsed, Weather)
    assert {"chunk", "content.delta", "content.done"} <= kinds
    tool = openai.pydantic_function_tool(Weather, name="tell")
    called = gpt.chat.completions.parse(model="noise", messages=ASK, tools=[tool], tool_choice="required", max_tokens=1000)
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)


class Day(pydantic.BaseModel, extra="forbid"):
    """Another schema than that of the tool."""

    name: Literal["Monday", "Tuesday"]


def test_openai_tools_and_a_response_format_at_once(gpt):
    """The noise begins now a call and now an answer; either follows its schema, streamed or whole."""
    tool = openai.pydantic_function_tool(Weather, name="tell")
    asked = {"model": "noise", "messages": ASK, "tools": [tool], "response_format": Day, "max_tokens": 1000, "n": 8, "seed": 5000}
    whole = gpt.chat.completions.parse(**asked)
    with gpt.chat.completions.stream(**asked) as stream:
        stream.until_done()
    for reply in (whole, stream.get_final_completion()):
        assert {choice.finish_reason for choice in reply.choices} == {"stop", "tool_calls"}
        for choice in reply.choices:
            calls = choice.message.tool_calls or []
            assert all(isinstance(call.function.parsed_arguments, Weather) for call in calls)
            assert isinstance(choice.message.parsed, Day) is not bool(calls)
    tools, kinds = [{"type": "function", **tool["function"]}], set()
    told = {"model": "noise", "input": "x", "text_format": Day, "max_output_tokens": 1000}
    for seed in range(60):  # until both have been: one in ten begins with an answer
        reply = gpt.responses.parse(**told, tools=tools, extra_body={"seed": seed})
        calls = [item.parsed_arguments for item in reply.output if item.type == "function_call"]
        assert all(Weather.model_validate(call) for call in calls)
        assert isinstance(reply.output_parsed, Day) is not bool(calls)
        kinds.add(bool(calls))
        if len(kinds) == 2:
            break
    assert kinds == {True, False}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own, of the type that it has parsed
def test_what_openai_s_parse_gives_is_taken_back(gpt):
    """The client sends its messages as they are, with what it has parsed."""
    asked = {"model": "noise", "max_tokens": 1000, "parallel_tool_calls": False}
    said = gpt.chat.completions.parse(**asked, messages=ASK, response_format=Weather).choices[0].message
    tools = [openai.pydantic_function_tool(Weather, name="tell")]
    called = gpt.chat.completions.parse(**asked, messages=ASK, tools=tools, tool_choice="required").choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "done"}
    for turns in ([said, *ASK], [called, result]):
        reply = gpt.chat.completions.create(model="noise", max_tokens=4, messages=[*ASK, *turns], tools=tools)
        assert reply.usage.completion_tokens > 0


def test_openai_responses_parse_stream_and_count(gpt):
    asked = {"model": "noise", "input": "x", "text_format": Weather, "max_output_tokens": 1000}
    assert isinstance(gpt.responses.parse(**asked).output_parsed, Weather)
    with gpt.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Weather)
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    tool = openai.pydantic_function_tool(Weather, name="tell")["function"] | {"type": "function"}
    asked = {"model": "noise", "input": "x", "instructions": "y", "tools": [tool], "tool_choice": "required"}
    called = gpt.responses.parse(**asked, max_output_tokens=1000)
    Weather.model_validate(called.output[0].parsed_arguments)
    counted = gpt.responses.input_tokens.count(**asked, truncation="disabled", parallel_tool_calls=False)
    assert counted.input_tokens == called.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="not stored"):
        gpt.responses.input_tokens.count(model="noise", input="x", previous_response_id="resp_1")


def test_a_structured_answer_that_is_cut_is_an_error_of_the_client_and_not_none(gpt):
    with pytest.raises(openai.LengthFinishReasonError):
        gpt.chat.completions.parse(model="noise", messages=ASK, response_format=Weather, max_tokens=4)


# LangChain


@pytest.fixture(scope="module", params=[False, True], ids=["chat", "responses"])
def chain(request: pytest.FixtureRequest, noisy: str):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=f"{noisy}/v1", api_key="none", model="noise", max_tokens=1000, max_retries=0, use_responses_api=request.param
    )


def test_langchain_invokes_and_streams(chain):
    asked = [("system", "s"), ("human", "x")]
    reply = chain.invoke(asked, temperature=0)
    assert reply.usage_metadata["output_tokens"] > 0
    chunks = list(chain.stream(asked, temperature=0))
    assert "".join(chunk.text for chunk in chunks) == reply.text


def test_langchain_sees_that_a_prompt_is_too_long(chain):
    from langchain_core.exceptions import ContextOverflowError

    with pytest.raises(ContextOverflowError):
        chain.invoke("x " * 100_000)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(chain, method):
    assert isinstance(chain.with_structured_output(Weather, method=method).invoke("x"), Weather)


def test_langchain_structured_output_that_is_cut_is_no_silent_none(chain):
    short = chain.model_copy(update={"max_tokens": 50})
    found = short.with_structured_output(Weather, method="function_calling", include_raw=True).invoke("x")
    assert found["parsed"] is None
    raw = found["raw"].response_metadata
    assert (raw.get("finish_reason"), (raw.get("incomplete_details") or {}).get("reason")) in (
        ("length", None),
        (None, "max_output_tokens"),
    )


def test_langchain_tools_and_their_results(chain):
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = chain.bind_tools([Weather], tool_choice="any")
    called = bound.invoke([HumanMessage("x")])
    (call,) = called.tool_calls[:1]
    Weather.model_validate(call["args"])
    results = [ToolMessage("done", tool_call_id=each["id"]) for each in called.tool_calls]
    assert chain.bind_tools([Weather]).invoke([HumanMessage("x"), called, *results]).usage_metadata["input_tokens"] > 0
    gathered = None
    for chunk in bound.stream([HumanMessage("x")]):
        gathered = chunk if gathered is None else gathered + chunk
    Weather.model_validate(gathered.tool_calls[0]["args"])


# LiteLLM, in a process of its own: it leaves an event loop open


LITELLM = """
import json, socket, sys

def looked_up(host, *rest, real=socket.getaddrinfo, **more):
    assert host == "127.0.0.1", f"litellm asks for {host}"
    return real(host, *rest, **more)

socket.getaddrinfo = looked_up
import litellm

url, tool = sys.argv[1], json.loads(sys.argv[2])
asked = {"model": "openai/noise", "api_base": url, "api_key": "none", "max_tokens": 1000}
asked["messages"] = [{"role": "user", "content": "x"}]
whole = litellm.completion(**asked, temperature=0).choices[0].message.content
parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, temperature=0, stream=True)]
called = litellm.completion(**asked, tools=[tool], tool_choice="required").choices[0]
turns = [*asked["messages"], called.message, {"role": "tool", "tool_call_id": called.message.tool_calls[0].id, "content": "1"}]
litellm.completion(**asked | {"model": "hosted_vllm/noise", "messages": turns}, tools=[tool], tool_choice="none")
schema = {"type": "json_schema", "json_schema": {"name": "tell", "schema": tool["function"]["parameters"]}}
formatted = litellm.completion(**asked, response_format=schema).choices[0].message.content
arguments = called.message.tool_calls[0].function.arguments
print(json.dumps([whole, "".join(parts), called.finish_reason, arguments, formatted]))
"""


@pytest.mark.skipif(not EVERYTHING, reason="its imports alone take eight seconds; it asks for what OpenAI's own client asks for")
def test_litellm_completes_streams_and_calls_and_asks_nobody_else(noisy):
    tool = {"type": "function", "function": {"name": "tell", "parameters": Weather.model_json_schema()}}
    flags = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}
    command = [sys.executable, "-c", LITELLM, f"{noisy}/v1", json.dumps(tool)]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    whole, streamed, finish_reason, arguments, formatted = json.loads(done.stdout.splitlines()[-1])
    assert whole == streamed
    assert finish_reason == "tool_calls"
    Weather.model_validate_json(arguments)
    Weather.model_validate_json(formatted)
