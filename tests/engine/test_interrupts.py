"""What comes amid a step: Ctrl-C, and streams that are collected as garbage. The engine's books stay whole, and it goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from enginery import LLM, AsyncLLM, SamplingParams
from enginery.errors import EnginError
from enginery.llm.interrupts import interrupts_later
from enginery.llm.prompts import Encoded, PromptEncoder
from enginery.text.renderer import Renderer

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
CHAT = [{"role": "user", "content": "first"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_pages=64, dtype="float32") as model:
        yield model


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def amid(patch: pytest.MonkeyPatch, owner: object, name: str, what: Callable[[], None]) -> None:
    """Do something behind the owner's next call of that name, before it returns."""
    usual, left = getattr(owner, name), [what]

    def call(*given: object, **named: object) -> object:
        found = usual(*given, **named)
        while left:
            left.pop()()
        return found

    patch.setattr(owner, name, call)


def waiting(*what: Callable[[], object]) -> None:
    with interrupts_later():
        for each in what:
            each()


def test_a_first_ctrl_c_waits_for_the_block_and_a_second_one_does_not() -> None:
    before, reached = signal.getsignal(signal.SIGINT), list[str]()
    with pytest.raises(KeyboardInterrupt):
        waiting(interrupt, lambda: reached.append("the end"))
    with pytest.raises(KeyboardInterrupt):
        waiting(interrupt, interrupt, lambda: reached.append("not this"))
    with pytest.raises(StopIteration):
        waiting(lambda: next(iter(())))
    assert (reached, signal.getsignal(signal.SIGINT)) == (["the end"], before)
    thread = threading.Thread(target=waiting, args=[lambda: reached.append("elsewhere nothing is changed")])
    thread.start()
    thread.join()
    assert len(reached) == 2


def begin_and_leave(llm: LLM) -> None:
    stream = llm.stream("x", GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["next_step", "submit", "complete", "abort"])
def test_after_ctrl_c_amid_what_the_scheduler_notes_the_next_call_is_answered(
    llm: LLM, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
    assert llm._engine is not None
    with monkeypatch.context() as patch:
        amid(patch, llm._engine._scheduler, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            begin_and_leave(llm) if where == "abort" else llm.generate(PROMPTS, GREEDY)
    for _ in range(2):
        assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == expected


def test_a_stream_that_is_collected_amid_a_step_is_aborted_behind_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As garbage in a cycle is, whenever Python collects."""
    expected = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
    assert llm._engine is not None
    stream = llm.stream("Tell me", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    running = []

    def collect() -> None:
        stream.close()  # type: ignore[attr-defined]
        running.append(llm._engine._scheduler.num_running)  # type: ignore[union-attr]

    amid(monkeypatch, llm._engine._scheduler, "next_step", collect)
    assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == expected
    assert running == [3], "not yet"
    assert llm._engine._scheduler.num_running == 0
    assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == expected


def test_after_ctrl_c_while_a_template_renders_a_conversation_gets_its_own_prompt(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = [{"role": "user", "content": "What is 2 plus 3?"}]
    expected = llm.chat(other, GREEDY).prompt_token_ids
    with monkeypatch.context() as patch:
        patch.setattr(Renderer, "_read", lambda *_: interrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.chat(CHAT, GREEDY)
    assert llm.chat(other, GREEDY).prompt_token_ids == expected


def test_a_closed_llm_starts_no_process_to_render() -> None:
    with LLM(num_pages=64, dtype="float32") as model:
        pass
    with pytest.raises(EnginError, match="this LLM was closed"):
        model.chat(CHAT, GREEDY)
    assert model.text is None or model.text.template._renderer is None


def test_a_request_is_aborted_while_its_prompt_is_encoded_and_forks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        async with AsyncLLM(num_pages=64, dtype="float32") as model:
            encode, entered, go_on = PromptEncoder.encode_any, threading.Event(), threading.Event()

            def slowly(self: PromptEncoder, prompt: str) -> Encoded:
                entered.set()
                assert go_on.wait(60)
                return encode(self, prompt)

            monkeypatch.setattr(PromptEncoder, "encode_any", slowly)
            asked = asyncio.create_task(model.generate("Tell", params, request_id="a"))
            assert await asyncio.to_thread(entered.wait, 60)
            model.abort("a")
            go_on.set()
            answer = await asked
            assert (answer.finish_reason, len(answer.token_ids) < 400) == ("abort", True)
            model._thread._pid = os.getpid() + 1  # as a fork has it
            with pytest.raises(EnginError, match="this process is a fork, and the engine its parent's"):
                await model.generate("x", params)
        with pytest.raises(EnginError):
            await model.generate(CHAT, params)

    asyncio.run(run())
