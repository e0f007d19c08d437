"""What a body says about the chat template, over HTTP and with the official client.

The fake engine repeats the prompt, so that an answer shows it. The template thinks unless it is told not to, and the fake parser of
reasoning takes "(think)" at the end of a prompt for its beginning.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import httpx
import openai
import pytest
from running import PATIENCE_S, started
from templates_made import QWEN
from tokenizers_made import byte_level, save

from enginery.contracts.parsers import ParserSpec
from enginery.errors import RequestError
from enginery.plugin.boundary import guarded_parser
from enginery.plugin.registry import Registry
from enginery.serve.api.answer_parsers import Parsers
from enginery.serve.schemas.body_decoding import decode_request
from enginery.serve.schemas.chat import ChatRequest
from enginery.text.template import ChatTemplate

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '(think)' if enable_thinking is not defined or enable_thinking }}<assistant>{% endif %}"
)
LEVELS = "[{{ reasoning_effort or 'usual' }}]{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SWITCHLESS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}(think)<assistant>"
ASKED = [{"role": "user", "content": "hi"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "I am"}]


def made(path: Path, template: str) -> Path:
    folder = save(byte_level(), path, chat_template=template)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Fake"]}))
    return folder


class Client:
    """The official one, and plain requests."""

    def __init__(self, url: str) -> None:
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="x", timeout=PATIENCE_S, max_retries=0)
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.openai.close()
        self.http.close()

    def chat(self, messages=ASKED, **given):
        return self.openai.chat.completions.create(model="fake", messages=messages, **given).choices[0].message

    def refusal(self, path="/v1/chat/completions", **body) -> tuple[int, str, str]:
        response = self.http.post(path, json={"messages": ASKED, **body})
        error = response.json()["error"]
        return response.status_code, error["param"], error["message"]

    def prompt(self, **body) -> str:
        tokens = self.http.post("/tokenize", json={"messages": ASKED, **body}).raise_for_status().json()["tokens"]
        return self.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with started(made(tmp_path_factory.mktemp("thinks"), TEMPLATE)) as (_, url), Client(url) as found:
        yield found


@pytest.fixture(scope="module")
def trusting(tmp_path_factory):
    """Its operator trusts templates of requests, and gave one as a file; no parser of reasoning."""
    file = tmp_path_factory.mktemp("file") / "levels.jinja"
    file.write_text(LEVELS)
    settings = {"trust_request_chat_template": True, "reasoning_parser": "none", "options": {"chat_template": str(file)}}
    with started(made(tmp_path_factory.mktemp("trusting"), TEMPLATE), **settings) as (_, url), Client(url) as found:
        yield found


@pytest.fixture(scope="module")
def switchless(tmp_path_factory):
    with started(made(tmp_path_factory.mktemp("always"), SWITCHLESS)) as (_, url), Client(url) as found:
        yield found


def reasoning_of(message):
    return (message.model_extra or {}).get("reasoning_content")


@pytest.mark.parametrize(
    "given",
    [
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "none", "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"extra_body": {"thinking": {"type": "disabled"}}},
        {"extra_body": {"enable_thinking": False}},
        {"extra_body": {"reasoning": {"enabled": False}}},
        {"extra_body": {"reasoning": {"effort": "none", "exclude": False}}},
    ],
    ids=["variable", "effort", "both", "glm", "qwen", "openrouter", "cline"],
)
def test_thinking_is_switched_off_and_the_answer_is_read_as_one(client, given):
    message = client.chat(**given)
    assert (message.content, reasoning_of(message)) == ("<user>hi<assistant>", None)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
        {"reasoning_effort": "low"},
        {"reasoning_effort": "max"},
        {"extra_body": {"chat_template_kwargs": None, "reasoning_effort": None}},
        {"extra_body": {"thinking": {"type": "enabled", "budget_tokens": 1024}}},
        {"extra_body": {"enable_thinking": True}},
        {"extra_body": {"reasoning": {"effort": "high", "enabled": True, "max_tokens": 2000}}},
        {"verbosity": "low"},
    ],
    ids=["default", "variable", "low", "max", "null", "anthropic", "qwen", "openrouter", "verbosity"],
)
def test_thinking_that_is_on_is_read_as_reasoning(client, given):
    message = client.chat(**given)
    assert (message.content, reasoning_of(message)) == ("", "<user>hi(think)<assistant>")


def test_a_stream_is_read_in_the_same_way(client):
    for effort, field in (("none", "content"), ("high", "reasoning_content")):
        stream = client.openai.chat.completions.create(model="fake", messages=ASKED, stream=True, reasoning_effort=effort)
        deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
        told = {"content": "".join(delta.content or "" for delta in deltas)}
        told["reasoning_content"] = "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas)
        assert [name for name, text in told.items() if text] == [field]


@pytest.mark.parametrize(
    "body",
    [{"reasoning": {"exclude": True}}, {"include_reasoning": False}, {"thinking": {"type": "enabled", "display": "omitted"}}],
    ids=str,
)
def test_reasoning_is_left_out_of_the_answer_when_that_is_asked_for(client, body):
    """As Cline does with GLM's models."""
    message = client.chat(extra_body=body)
    assert (message.content, reasoning_of(message)) == ("", None)
    stream = client.openai.chat.completions.create(model="fake", messages=ASKED, stream=True, extra_body=body)
    assert not any((chunk.choices[0].delta.model_extra or {}).get("reasoning_content") for chunk in stream if chunk.choices)


@pytest.mark.parametrize(
    ("body", "effort"),
    [
        ({}, None),
        ({"reasoning": {"exclude": True}}, None),
        ({"reasoning": {"enabled": True}}, "medium"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "low"}, "low"),
        ({"thinking": {"type": "adaptive"}, "reasoning": {"effort": "xhigh"}}, "xhigh"),
        ({"reasoning": {"effort": "high", "enabled": False}}, "none"),
        ({"enable_thinking": True}, "medium"),
        ({"enable_thinking": True, "reasoning_effort": "low"}, "low"),
        ({"enable_thinking": False, "reasoning_effort": "low"}, "none"),
    ],
    ids=str,
)
def test_fields_about_reasoning_are_one_effort(body, effort):
    assert decode_request(json.dumps({"messages": ASKED} | body).encode(), ChatRequest).effort == effort


VERBOSE = "[{{ verbosity or 'usual' }}]{% for m in messages %}{{ m.content }}{% endfor %}"


def test_verbosity_is_for_templates_that_have_it(client, trusting):
    assert trusting.prompt(chat_template=VERBOSE, verbosity="low") == "[low]hi"
    assert trusting.prompt(chat_template=VERBOSE) == "[usual]hi"
    refused = trusting.refusal(chat_template=VERBOSE, verbosity="low", chat_template_kwargs={"verbosity": "high"})
    assert refused[1:] == (
        "chat_template_kwargs",
        "chat_template_kwargs: it has verbosity 'high', against a verbosity of 'low'; send one of them",
    )
    assert client.prompt(verbosity="high") == client.prompt() == "<user>hi(think)<assistant>"
    with contextlib.closing(ChatTemplate(VERBOSE, variables={})) as template, pytest.raises(RequestError, match="has none of"):
        template.render(ASKED, switches={"reasoning_effort": "none", "verbosity": "low"}, needs_switch=True)


@pytest.mark.parametrize(
    "body", [{"reasoning": {"enabled": False}}, {"thinking": {"type": "disabled"}}, {"enable_thinking": False}], ids=str
)
def test_tokenize_takes_what_chats_say_of_reasoning(client, body):
    assert client.prompt(**body) == "<user>hi<assistant>"


def test_responses_have_it_too(client):
    for given, kinds in (
        ({"reasoning": {"effort": "none", "summary": "auto"}}, ["message"]),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, ["message"]),
        ({"reasoning": {"effort": "high"}}, ["reasoning"]),
        ({}, ["reasoning"]),
    ):
        response = client.openai.responses.create(model="fake", input="hi", **given)
        assert [item.type for item in response.output] == kinds
    assert response.reasoning is None
    assert client.openai.responses.create(model="fake", input="hi", reasoning={"effort": "low"}).reasoning.effort == "low"


def test_tokenize_writes_what_a_chat_reads(client):
    for body in (
        {},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"add_generation_prompt": False},
        {"messages": BEGUN, "continue_final_message": True},
        {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False},
    ):
        reply = client.http.post("/v1/chat/completions", json={"messages": ASKED, **body}).json()
        message = reply["choices"][0]["message"]
        assert client.prompt(**body) == message["content"] + message.get("reasoning_content", "")


def test_the_final_message_is_continued(client):
    body = {"continue_final_message": True, "add_generation_prompt": False}
    message = client.chat(BEGUN, extra_body=body)
    assert (message.content, reasoning_of(message)) == ("<user>hi<assistant>I am", None)
    parts = [*ASKED, {"role": "assistant", "content": [{"type": "text", "text": "I"}, {"type": "text", "text": "am "}]}]
    assert client.chat(parts, extra_body=body).content == "<user>hi<assistant>I\nam "


@pytest.mark.parametrize(
    ("said", "inside"),
    [("(think)so far", True), ("\n(think)", True), ("(think)so far(done)", False), ("so (think)", False), ("", False)],
)
def test_a_message_that_is_continued_within_its_reasoning_is_read_from_there(client, said, inside):
    message = client.chat([*ASKED, {"role": "assistant", "content": said}], extra_body={"continue_final_message": True})
    begins_with = reasoning_of(message) if inside else message.content
    assert str(begins_with).startswith("<user>hi<assistant>")


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({"continue_final_message": True}, "continue_final_message", "of the role user"),
        (
            {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "goes without",
        ),
        ({"chat_template": "x"}, "chat_template", "--trust-request-chat-template"),
        ({"chat_template": ""}, "chat_template", "--trust-request-chat-template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "not the caller's"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "not the caller's"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "not the caller's"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "not the caller's"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs", "not the caller's"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs", "not the caller's"),
        ({"chat_template_kwargs": {"enable_thinkin": False}}, "chat_template_kwargs", "does not use the variable 'enable_thinkin'"),
        ({"chat_template_kwargs": {f"x{place}": 0 for place in range(999)}}, "chat_template_kwargs", "at most 64"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "object"),
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
            "chat_template_kwargs",
            "send one of them",
        ),
        ({"reasoning_effort": "some"}, "reasoning_effort", "must be 'high' or 'low'"),
        ({"enable_thinking": "no"}, "enable_thinking", "bool"),
        ({"chat_template_kwargs": {"enable_thinking": 1 << 70}}, "chat_template_kwargs", "64 bits"),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_what_cannot_be_honoured_is_refused_by_name(client, path, body, param, why):
    status, named, message = client.refusal(path, **body)
    assert (status, named) == (400, param)
    assert why in message
    assert len(message) < 500


def test_without_a_switch_reasoning_cannot_be_switched_off(switchless):
    status, param, message = switchless.refusal(reasoning_effort="none")
    assert (status, param) == (400, "reasoning_effort")
    assert "has none of reasoning_effort, enable_thinking, thinking" in message
    assert switchless.refusal(chat_template_kwargs={"enable_thinking": False})[:2] == (400, "chat_template_kwargs")
    with pytest.raises(openai.BadRequestError) as refused:
        switchless.openai.responses.create(model="fake", input="x", reasoning={"effort": "none"})
    assert refused.value.param == "reasoning"
    assert reasoning_of(switchless.chat(reasoning_effort="high"))


def test_agents_that_disable_thinking_are_answered_without_a_switch_and_not_told_it(switchless):
    """As Claude Code does with titles and summaries."""
    off = {"thinking": {"type": "disabled"}}
    message = switchless.chat(extra_body=off)
    assert (message.content, reasoning_of(message)) == ("", None)
    body = {"model": "fake", "max_tokens": 20, "messages": ASKED, **off}
    content = switchless.http.post("/v1/messages", json=body).raise_for_status().json()["content"]
    assert content == [{"type": "thinking", "thinking": "", "signature": ""}]


def test_a_model_that_does_not_reason_need_not_be_told_so(trusting):
    off = {"enable_thinking": False}
    assert trusting.prompt(chat_template="plain", chat_template_kwargs=off) == "plain"
    assert trusting.prompt(chat_template="plain", reasoning_effort="none") == "plain"
    assert trusting.refusal(chat_template="plain", chat_template_kwargs={"enable_thinking": True})[1] == "chat_template_kwargs"


def test_an_effort_is_a_variable_of_the_template(trusting):
    assert trusting.chat().content == "[usual]<user>hi"
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
        assert trusting.chat(reasoning_effort=effort).content == f"[{effort}]<user>hi"
    assert trusting.chat(extra_body={"chat_template_kwargs": {"reasoning_effort": "own"}}).content == "[own]<user>hi"


def test_the_operator_s_template_is_the_model_s(trusting):
    assert trusting.http.get("/tokenizer_info").json()["chat_template"] == LEVELS
    assert trusting.http.get("/server_info").json()["server"]["trust_request_chat_template"] is True


def test_a_trusted_request_brings_its_template(trusting):
    own = "{% for m in messages %}{{ m.content }}{{ mood }}{% endfor %}"
    body = {"chat_template": own, "chat_template_kwargs": {"mood": "!"}}
    assert trusting.chat(extra_body=body).content == "hi!"
    assert trusting.prompt(**body) == "hi!"
    assert trusting.chat().content == "[usual]<user>hi"


@pytest.mark.parametrize(
    ("template", "param"),
    [
        ("{% for", "chat_template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "messages"),
        ("{{ raise_exception('no') }}", "messages"),
        ("{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "messages"),
        ("{{ messages[9].content.upper() }}", "messages"),
    ],
)
def test_a_hostile_template_is_the_request_s_own_fault(trusting, template, param):
    assert trusting.refusal(chat_template=template)[:2] == (400, param)
    assert trusting.chat().content == "[usual]<user>hi"


def test_a_file_that_cannot_be_read_is_told_before_anything_is_loaded(tmp_path):
    folder = made(tmp_path, TEMPLATE)
    with started(folder, options={"chat_template": str(tmp_path / "nope.jinja")}) as (process, url):
        assert url == ""
        assert "nope.jinja cannot be read" in process.stderr.read()
        assert process.wait(PATIENCE_S) == 2


OPENS = QWEN.replace("{{- '<think>\\n\\n</think>\\n\\n' }}", "{{- '<think>\\n\\n</think>\\n\\n' }}{%- else %}{{- '<think>\\n' }}")


@pytest.mark.parametrize("template", [QWEN, OPENS], ids=["the answer opens it", "the prompt opens it"])
def test_the_parser_of_qwen_reads_answers_of_its_template_both_ways(with_server, template):
    (offer,) = (offer for offer in Registry.load().offers(ParserSpec) if offer.name == "qwen3")

    async def scenario(live):
        text = live.service.model().text
        text.template.close()
        object.__setattr__(text, "template", ChatTemplate(template, variables={}))
        off = (await live.chat("hi", chat_template_kwargs={"enable_thinking": False})).json()["choices"][0]["message"]
        assert off["content"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        assert "reasoning_content" not in off
        assert (await live.chat("hi", reasoning_effort="none")).json()["choices"][0]["message"] == off
        on = (await live.chat("hi", reasoning_effort="high")).json()["choices"][0]["message"]
        assert ("reasoning_content" in on) == (template is OPENS)
        told = {"role": "assistant", "content": "<think>\nso far"}
        messages = [*ASKED, told]
        inside = (await live.post("/v1/chat/completions", messages=messages, continue_final_message=True)).json()
        assert inside["choices"][0]["message"]["reasoning_content"].startswith("<|im_start|>user")

    with_server(scenario, parsers=Parsers(reasoning=guarded_parser(offer)))
