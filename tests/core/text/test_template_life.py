"""The process that renders: killed, stopped, gone before it began; nobody's conversation is blamed for it, and nobody hangs."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import psutil
import pytest

from enginery.errors import RequestError
from enginery.text import renderer
from enginery.text.template import ChatTemplate, TemplateStuck
from enginery.text.template_process import Limits

ASKED = [{"role": "user", "content": "hello"}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PATIENCE_S = 50


def process_of(before: set[int]) -> psutil.Process:
    """The one that was started since."""
    found = [
        child
        for child in psutil.Process().children()
        if child.pid not in before and "template_process" in " ".join(child.cmdline())
    ]
    (process,) = found
    return process


def await_end(process: psutil.Process) -> None:
    """Without taking its exit code from the parent, which is the renderer."""
    deadline = time.monotonic() + PATIENCE_S
    while process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def running():
    """A template whose process runs, and the process."""
    made = []

    def start(template=TEMPLATE, **limits):
        before = {child.pid for child in psutil.Process().children()}
        made.append(ChatTemplate(template, variables={}, limits=Limits(**limits)))
        assert made[-1].answers(PATIENCE_S)
        return made[-1], process_of(before)

    yield start
    for template in made:
        template.close()


def test_a_killed_process_is_started_again_and_the_conversation_is_answered(running):
    template, process = running()
    for _ in range(3):
        before = {child.pid for child in psutil.Process().children()}
        process.send_signal(signal.SIGKILL)
        await_end(process)
        assert template.render(ASKED) == "<user>hello"
        process = process_of(before)


def test_a_process_that_is_killed_in_the_midst_of_a_conversation_is_started_again(running):
    loops = "{% if messages|length > 1 %}{% for i in range(9999) %}{% for j in range(999) %}{% endfor %}{% endfor %}{% endif %}done"
    template, process = running(loops, cpu_s=PATIENCE_S, wall_s=PATIENCE_S)
    answers = []
    chat = threading.Thread(target=lambda: answers.append(template.render(ASKED * 2)))
    chat.start()
    while process.cpu_times().user + process.cpu_times().system < 0.2 and process.status() == psutil.STATUS_SLEEPING:
        time.sleep(0.01)
    process.kill()
    chat.join(PATIENCE_S)
    assert answers == ["done"]


def test_what_is_rendered_when_a_template_is_closed_is_not_begun_again(running):
    """A server that ended waited for it once more, up to five seconds of a process that was started for this."""
    loops = "{% if messages|length > 1 %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    template, process = running(loops, cpu_s=PATIENCE_S, wall_s=PATIENCE_S)
    refused = []

    def chat():
        try:
            template.render(ASKED * 2)
        except (RequestError, TemplateStuck) as error:
            refused.append(type(error))

    rendering = threading.Thread(target=chat)
    rendering.start()
    before = process.cpu_times().user
    while process.cpu_times().user < before + 0.1:
        time.sleep(0.01)
    began = time.monotonic()
    template.close()
    rendering.join(PATIENCE_S)
    assert refused == [TemplateStuck]
    assert time.monotonic() - began < PATIENCE_S / 2


def test_a_stopped_process_is_replaced_after_its_time_and_the_conversation_is_answered(running):
    template, process = running(wall_s=4)
    process.suspend()
    assert template.render(ASKED) == "<user>hello"
    assert not process.is_running()


def test_a_large_conversation_for_a_stopped_process_hangs_no_longer_than_a_small_one(running):
    template, process = running(wall_s=4)
    process.suspend()
    assert len(template.render([{"role": "user", "content": "x" * 5_000_000}])) == 5_000_006


def test_a_process_that_ends_again_and_again_is_the_server_s_fault(running, monkeypatch):
    template, process = running(wall_s=4)
    process.kill()
    await_end(process)
    monkeypatch.setattr(renderer, "_COMMAND", (sys.executable, "-c", "import time; time.sleep(99)"))
    with pytest.raises(TemplateStuck, match="cannot be started: no answer within 4 s"):
        template.render(ASKED)
    assert not template.answers(0.1)
    monkeypatch.setattr(renderer, "_COMMAND", ("/no/such/python",))
    with pytest.raises(TemplateStuck, match=r"cannot be started: .*No such file"):
        template.render(ASKED)
    assert not template.answers(0.1)
    monkeypatch.undo()
    assert template.answers(PATIENCE_S)
    assert template.render(ASKED) == "<user>hello"


def test_a_process_that_does_not_answer_is_told_and_replaced(running):
    template, process = running()
    assert template.answers(PATIENCE_S)
    process.suspend()
    assert not template.answers(0.2)
    assert not process.is_running()
    assert template.answers(PATIENCE_S)


def test_a_probe_of_a_process_that_was_killed_starts_the_next(running):
    template, process = running()
    process.kill()
    await_end(process)
    assert template.answers(PATIENCE_S)


def test_who_waits_for_a_turn_waits_no_longer_than_allowed(running):
    template, process = running(wall_s=2)
    process.suspend()
    began = time.monotonic()
    results = []

    def chat():
        try:
            results.append(template.render(ASKED))
        except TemplateStuck as error:
            results.append(error)

    chats = [threading.Thread(target=chat) for _ in range(8)]
    for thread in chats:
        thread.start()
    for thread in chats:
        thread.join(PATIENCE_S)
    assert len(results) == 8
    assert "<user>hello" in results
    assert time.monotonic() - began < PATIENCE_S


def test_a_process_ended_by_its_limits_is_the_conversation_s_fault_and_is_not_tried_twice(running):
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template, process = running(loops, cpu_s=0.3)
    with pytest.raises(RequestError, match=r"took over 0.3 s"):
        template.render(ASKED)
    assert not process.is_running()
    assert not [child for child in psutil.Process().children() if "template_process" in " ".join(child.cmdline())]


def test_no_descriptor_is_left_behind(running, monkeypatch):
    template, _ = running()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(renderer, "_COMMAND", ("/no/such/python",))
    template.close()
    for _ in range(5):
        assert not template.answers(1)
    monkeypatch.undo()
    for _ in range(3):
        assert template.answers(PATIENCE_S)
        template.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
