"""The fixtures that plugins' tests are given work."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import quick_processes

from enginery.api import EngineHandle, GenerationRequest, SamplingParams
from enginery.contracts.parsers import ParserSpec
from enginery.plugin.registry import Registry
from enginery.testing import fixtures
from enginery.testing.fixtures import StubEngine, queued, running_server, step_report, tiny_checkpoint, tiny_llm
from enginery.testing.kits.parsers import ParserSuite

__all__ = ["running_server", "tiny_checkpoint", "tiny_llm"]


def test_a_tiny_engine_answers(tiny_llm) -> None:
    (answer,) = tiny_llm.generate(["hello"], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    assert len(answer.token_ids) == 4


def test_a_running_server_answers(running_server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    answer = httpx.post(f"{running_server}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text


@pytest.fixture
def faked(tmp_path, monkeypatch) -> Iterator[Callable[[str], None]]:
    """Has `serving` start a script of the shell, which writes its number to the file `pid`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(fixtures, "_START_S", 2.0)

    def fake(script: str) -> None:
        Path("python").write_text(f"#!/bin/sh\necho $$ > pid\n{script}\n")
        Path("python").chmod(0o755)

    with quick_processes.own_processes():
        yield fake


@pytest.mark.parametrize("script", ["echo no such model", "echo no such model; exec sleep 600"])
def test_a_server_that_is_not_ready_in_time_is_told_with_its_lines_and_ended(faked, script: str) -> None:
    faked(script)
    with pytest.raises(RuntimeError, match="did not start:\nno such model"), fixtures.serving("x"):
        pass
    assert not psutil.pid_exists(int(Path("pid").read_text()))


def test_a_server_may_say_much_and_is_killed_if_it_does_not_end(faked) -> None:
    faked("trap '' TERM; echo 'ready: m at http://h:1, x'; head -c 300000 /dev/zero; touch said; exec sleep 600")
    with contextlib.ExitStack() as stack:
        assert stack.enter_context(fixtures.serving("x")) == "http://h:1"
        while not Path("said").exists():
            time.sleep(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            stack.pop_all().close()
    assert not psutil.pid_exists(int(Path("pid").read_text()))


def test_a_stub_engine_is_a_handle() -> None:
    engine: EngineHandle = StubEngine()

    async def ask() -> list[tuple[int, ...]]:
        request = GenerationRequest(request_id="a", prompt_token_ids=(1, 2), params=SamplingParams())
        async with engine.generate([request]) as outputs:
            return [output.token_ids async for output in outputs]

    assert asyncio.run(ask()) == [(1, 2)]


def test_small_values_take_changes() -> None:
    assert queued(num_tokens=3).num_tokens == 3
    assert step_report(num_preempted=2).num_preempted == 2


PARSERS = [offer.spec for offer in Registry.load().offers(ParserSpec)]


@pytest.mark.parametrize("spec", PARSERS, ids=lambda spec: f"{spec.kind}-{spec.name}")
def test_the_plugins_parsers_keep_the_rules(spec) -> None:
    suite = type("Suite", (ParserSuite,), {"parser": spec, "texts": ("<think>why</think>so", "no <b tags", "</think>", "<think")})()
    suite.test_any_cut_gives_the_same_events()
    suite.test_answers_that_are_read_by_turns_do_not_mix()
    suite.test_what_is_not_of_the_format_is_content() if spec.kind == "tools" else None
    suite.test_nothing_is_raised_whatever_the_text()
