"""The template's process is stopped or killed under a server: nobody hangs, nothing else waits, and the probes tell."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import psutil
import pytest

from enginery.errors import RequestError
from enginery.serve.api.chat_templates import TemplateTurns
from enginery.serve.api.served_model import ServedModel
from enginery.serve.schemas.body_decoding import decode_request
from enginery.serve.schemas.chat import ChatRequest
from enginery.text.template import ChatTemplate
from enginery.text.template_process import Limits

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def template_process() -> psutil.Process:
    """Of this process's children."""
    children = psutil.Process().children()
    return next(child for child in reversed(children) if "template_process" in " ".join(child.cmdline()))


def give_template(live, **limits):
    text = live.service.model().text
    text.template.close()
    object.__setattr__(text, "template", ChatTemplate(TEMPLATE, variables={}, limits=Limits(**limits)))


async def status(live, path="/health/ready"):
    response = await live.http.get(path)
    return response.status_code, response.json()["status"]


async def until_ready_is(live, wanted):
    while (await status(live))[0] != wanted:
        await asyncio.sleep(0.05)


def test_eight_chats_of_a_stopped_template_hold_no_thread_and_the_probe_tells(with_server):
    async def scenario(live):
        give_template(live, wall_s=120)
        assert (await live.chat("hi")).status_code == 200
        process = template_process()
        process.suspend()
        chats = [asyncio.create_task(live.chat("hi")) for _ in range(8)]
        await live.until(live.service.model().turns._turn.locked)
        await until_ready_is(live, 503)
        assert await status(live) == (503, "template_stuck")
        assert await status(live, "/health") == (503, "template_stuck")
        assert await status(live, "/health/live") == (200, "live")
        long = await asyncio.gather(*(live.post("/tokenize", prompt="word " * 9000) for _ in range(8)))  # each on a thread
        assert [reply.json()["error"]["param"] for reply in long] == ["prompt"] * 8 or {reply.status_code for reply in long} == {
            200
        }
        assert not any(chat.done() for chat in chats)
        process.resume()
        assert [reply.status_code for reply in await asyncio.gather(*chats)] == [200] * 8
        await until_ready_is(live, 200)

    with_server(scenario)


def test_chats_of_a_stopped_template_are_answered_by_a_new_process(with_server):
    async def scenario(live):
        give_template(live, wall_s=5)
        assert (await live.chat("hi")).status_code == 200
        process = template_process()
        process.suspend()
        replies = await asyncio.gather(*(live.chat("hi") for _ in range(8)))
        assert "<user>hi" in [reply.json().get("choices", [{}])[0].get("message", {}).get("content") for reply in replies]
        assert {reply.status_code for reply in replies} <= {200, 503}
        assert not process.is_running()
        await until_ready_is(live, 200)

    with_server(scenario)


def test_a_killed_template_costs_no_chat_its_answer(with_server):
    async def scenario(live):
        for _ in range(3):
            assert (await live.chat("hi")).status_code == 200
            template_process().kill()
        assert (await live.chat("hi")).status_code == 200
        assert await status(live) == (200, "ready")

    with_server(scenario)


def test_the_probe_finds_a_stopped_template_that_nobody_uses_and_replaces_it(with_server):
    async def scenario(live):
        await until_ready_is(live, 200)
        process = template_process()
        process.suspend()
        await until_ready_is(live, 503)
        await until_ready_is(live, 200)
        assert not process.is_running()
        assert (await live.chat("hi")).status_code == 200

    with_server(scenario)


def test_a_template_that_cannot_be_started_is_the_server_s_fault_until_it_can(with_server, monkeypatch):
    from enginery.text import renderer

    async def scenario(live):
        live.service.model().text.template.close()
        monkeypatch.setattr(renderer, "_COMMAND", ("/no/such/python",))
        refused = await live.chat("hi")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], refused.headers["retry-after"]) == (503, "template_stuck", "1")
        assert (await live.post("/v1/messages", messages=[{"role": "user", "content": "x"}], max_tokens=1)).status_code == 503
        assert (await live.complete("hi")).status_code == 200
        await until_ready_is(live, 503)
        monkeypatch.undo()
        await until_ready_is(live, 200)
        assert (await live.chat("hi")).status_code == 200

    with_server(scenario)


def test_a_model_without_a_template_is_ready(with_server):
    async def scenario(live):
        text = live.service.model().text
        text.template.close()
        object.__setattr__(text, "template", ChatTemplate(None, variables={}))
        assert await status(live) == (200, "ready")
        refused = await live.chat("hi")
        assert refused.status_code == 400
        assert "--chat-template FILE" in refused.json()["error"]["message"]

    with_server(scenario)


def test_a_conversation_that_takes_too_long_is_not_told_in_other_ways(monkeypatch):
    """Of which there are several, as it has reasoning, calls and tools."""
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ("a", "b")]
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls]
    thought = {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": calls}
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [{"role": "user", "content": "q"}, thought, *answers], "tools": tools}
    asked = decode_request(json.dumps(body).encode(), ChatRequest)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template, rendered = ChatTemplate(loops, variables={}, limits=Limits(cpu_s=0.3)), []
    render = ChatTemplate._rendered
    monkeypatch.setattr(ChatTemplate, "_rendered", lambda self, rendering: (rendered.append(rendering), render(self, rendering))[1])
    model = ServedModel(facts=SimpleNamespace(), text=SimpleNamespace(template=template))
    with pytest.raises(RequestError, match="took over"):
        asyncio.run(model.render(asked, tools=asked.tools))
    template.close()
    assert len(rendered) == 1


def test_the_turn_of_who_has_left_ends_with_its_thread():
    begun, go = [], threading.Event()

    def slow():
        begun.append("slow")
        assert go.wait(50)
        return ""

    async def scenario():
        turns, template = TemplateTurns(), SimpleNamespace(limits=Limits(wall_s=50))
        first = asyncio.create_task(turns.render(template, slow))
        while not begun:
            await asyncio.sleep(0.01)
        first.cancel()
        second = asyncio.create_task(turns.render(template, lambda: begun.append("next") or "text"))
        await asyncio.sleep(0.2)
        assert first.cancelled()
        assert begun == ["slow"]
        go.set()
        assert await second == "text"

    try:
        asyncio.run(scenario())
    finally:
        go.set()
