"""The fixtures that plugins' tests are given work."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from enginery.api import EngineHandle, GenerationRequest, SamplingParams
from enginery.contracts.parsers import ParserSpec
from enginery.plugin.registry import Registry
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
