"""`LLM.stream` and `AsyncLLM`: the same tokens as `generate`, as they come, and nobody's trouble is another's."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from engine.test_llm import GREEDY, TINY, continued, echo, llm

from enginery import LLM, AsyncLLM, SamplingParams
from enginery.contracts.grammars import Grammar, GrammarKind
from enginery.contracts.request import RequestOutput
from enginery.engine.engine import Engine
from enginery.errors import ConfigError, EnginError, RequestError
from enginery.llm.answers import Generation, GenerationDelta

__all__ = ["echo"]
PATIENCE_S = 50
ENDLESS = SamplingParams(temperature=0, max_tokens=180, ignore_eos=True)
FULL = SamplingParams(seed=3, max_tokens=40, n=3, logprobs=1, prompt_logprobs=1, stop=("e",), temperature=0.8)


def test_a_bar_of_progress_goes_to_standard_error(echo: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    llm(echo).generate([[1]], GREEDY, progress=True)
    out, err = capsys.readouterr()
    assert (out, "generating" in err) == ("", True)


def put_together(deltas: Iterable[GenerationDelta], index: int = 0) -> tuple[str, tuple[int, ...], Any, Any]:
    own = [delta for delta in deltas if delta.index == index]
    assert [delta.finish_reason for delta in own[:-1]] == [None] * (len(own) - 1)
    assert [delta.usage.num_output_tokens for delta in own] == list(itertools.accumulate(len(delta.token_ids) for delta in own))
    logprobs = tuple(logprob for delta in own for logprob in delta.logprobs or ())
    ids = tuple(token for delta in own for token in delta.token_ids)
    return "".join(delta.text for delta in own), ids, logprobs or None, own[-1].finish_reason


def as_deltas_should_be(generation: Generation) -> list[tuple[str, tuple[int, ...], Any, Any]]:
    return [(part.text, part.token_ids, part.logprobs, part.finish_reason) for part in generation.completions]


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    """Every engine that is built."""
    build = Engine.build
    monkeypatch.setattr(Engine, "build", lambda *asked, **how: BUILT.append(build(*asked, **how)) or BUILT[-1])
    yield BUILT
    BUILT.clear()


BUILT: list[Engine] = []


def engine_of(model: AsyncLLM) -> Engine:
    (found,) = [engine for engine in BUILT if engine.facts is model.facts]
    return found


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def num_open(model: AsyncLLM) -> int:
    return len(model._thread._open)


def running(folder: Path | None, scenario: Callable[[AsyncLLM], Awaitable[None]], **options: Any) -> None:
    """On the echo model of `folder`, or the embedded one; afterwards the engine has nothing open and every page back."""
    given = {**TINY, **options} if folder is None else {"model": str(folder), "load_format": "dummy", **TINY, **options}

    async def run() -> None:
        async with AsyncLLM(**given) as model, asyncio.timeout(PATIENCE_S):
            await scenario(model)
            engine = engine_of(model)
            await until(lambda: num_open(model) == 0 and not engine.has_work)
        engine._scheduler.check_idle()
        assert not model._names

    asyncio.run(run())


def test_a_stream_says_what_generate_says_as_it_comes() -> None:
    with LLM(**TINY) as model:
        for params in (FULL, SamplingParams(temperature=0, max_tokens=12), SamplingParams(seed=1, max_tokens=30, ignore_eos=True)):
            whole = model.generate("The engine", params)[0]
            deltas = list(model.stream("The engine", params))
            assert [put_together(deltas, index) for index in range(params.n)] == as_deltas_should_be(whole)
            assert {delta.usage.num_prompt_tokens for delta in deltas} == {len(whole.prompt_token_ids)}
            last = {delta.index: dataclasses.replace(delta.usage, num_cached_tokens=0) for delta in deltas}  # a prompt comes again
            assert [last[index] for index in range(params.n)] == [
                dataclasses.replace(each.usage, num_cached_tokens=0) for each in whole.completions
            ]
            prompt_logprobs = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs]
            assert prompt_logprobs == ([whole.prompt_logprobs] if params.prompt_logprobs else [])
        messages = [{"role": "user", "content": "Hello"}]
        params = SamplingParams(temperature=0, max_tokens=8)
        assert put_together(model.stream(messages, params))[1] == model.chat(messages, params).token_ids


def test_a_stream_yields_each_token_when_it_is_there(echo: Path) -> None:
    with llm(echo) as model:
        engine = model._engine
        assert engine is not None
        came = [(delta.token_ids, engine.meter.num_steps) for delta in model.stream([7, 8, 9], GREEDY)]
    assert [ids for ids, _ in came] == [(token,) for token in continued([7, 8, 9], 20)]
    assert [steps for _, steps in came] == list(range(came[0][1], came[0][1] + 20))


@pytest.mark.parametrize("leave", ["break", "close", "raise", "never begun"])
def test_leaving_a_stream_aborts_its_request(echo: Path, leave: str) -> None:
    with llm(echo) as model:
        engine = model._engine
        assert engine is not None
        deltas = model.stream([1, 2, 3], ENDLESS)
        if leave != "never begun":
            next(deltas)
            assert engine.has_work
        if leave == "break":
            for _ in deltas:
                break
            del deltas
        elif leave == "close":
            deltas.close()
        elif leave == "raise":
            with pytest.raises(ZeroDivisionError):
                deltas.throw(ZeroDivisionError())
        assert not engine.has_work
        engine._scheduler.check_idle()


def test_streams_and_generate_share_their_steps(echo: Path) -> None:
    with llm(echo) as model:
        prompts = [[seed, 8, 9] for seed in range(3)]
        streams = [model.stream(prompt, GREEDY) for prompt in prompts]
        begun = [next(stream) for stream in streams]
        assert model.generate([40, 41], ENDLESS)[0].token_ids == continued([40, 41], 180)
        rest = [list(stream) for stream in streams]
        for prompt, first, others in zip(prompts, begun, rest, strict=True):
            assert put_together([first, *others])[1] == continued(prompt, 20)
            assert len(others) < 19, "what generate's steps brought comes at once"


def test_one_request_that_fails_leaves_the_stream_beside_it_whole() -> None:
    with LLM(**TINY) as model:
        bad = SamplingParams(grammar=Grammar(kind=GrammarKind.REGEX, source="(("))
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        beside = model.stream("a", params)
        first = next(beside)
        with pytest.raises(RequestError, match="unclosed group"):
            model.generate(["x", "y"], [params, bad])
        with pytest.raises(RequestError, match="unclosed group"):
            list(model.stream("x", bad))
        assert put_together([first, *beside])[1] == model.generate("a", params)[0].token_ids


def test_what_is_no_prompt_or_no_params_is_refused_before_a_stream_begins(echo: Path) -> None:
    with llm(echo) as model:
        with pytest.raises(RequestError, match="neither text nor a list"):
            model.stream([1.5])
        for messages in ([{"role": "user", "content": "a"}], {"role": "user", "content": "a"}):
            with pytest.raises(RequestError, match=r"token ids; LLM\.chat takes messages$"):
                model.generate(messages)
        with pytest.raises(RequestError, match="must be SamplingParams"):
            model.stream([1], {"max_tokens": 3})
        stream = model.stream([1], ENDLESS)
        next(stream)
    with pytest.raises(EnginError, match="was closed"):
        next(stream)
    with pytest.raises(EnginError, match="was closed"):
        model.stream([1])


def test_requests_at_once_share_a_batch_and_say_what_they_say_alone(echo: Path) -> None:
    prompts = [[seed, *range(10, 10 + seed)] for seed in range(1, 30)]

    async def scenario(model: AsyncLLM) -> None:
        answers = await asyncio.gather(*(model.generate(prompt, GREEDY) for prompt in prompts))
        assert [answer.token_ids for answer in answers] == [continued(prompt, 20) for prompt in prompts]
        assert [answer.prompt_token_ids for answer in answers] == [tuple(prompt) for prompt in prompts]
        stats = engine_of(model).meter.stats()
        assert stats.num_steps < 20 * len(prompts) / 2, "one after the other, it were 20 steps for each"

    running(echo, scenario, num_pages=256)


def test_asyncio_says_what_llm_says_for_texts_chats_and_several_completions() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(**TINY) as model:
        whole, chat = model.generate("The engine", FULL)[0], model.chat(messages, params)

    async def scenario(model: AsyncLLM) -> None:
        told, deltas = await model.generate("The engine", FULL), [delta async for delta in model.stream("The engine", FULL)]
        assert told.completions == whole.completions
        assert told.prompt_logprobs == whole.prompt_logprobs
        assert [put_together(deltas, index) for index in range(3)] == as_deltas_should_be(whole)
        assert (await model.generate(messages, params)).token_ids == chat.token_ids
        assert put_together([delta async for delta in model.stream(messages, params)])[1] == chat.token_ids
        assert model.tokenizer is not None

    running(None, scenario)


@pytest.mark.parametrize("leave", ["cancel generate", "cancel stream", "break", "aclose", "abort"])
def test_leaving_ends_the_request_and_no_other(echo: Path, leave: str) -> None:
    async def scenario(model: AsyncLLM) -> None:
        beside = asyncio.create_task(model.generate([40, 41], ENDLESS))
        endless = model.stream([1, 2, 3], ENDLESS, request_id="mine")
        if leave.startswith("cancel"):
            first = asyncio.Event()

            async def read() -> None:
                async for _ in endless:
                    first.set()

            work = read() if leave == "cancel stream" else model.generate([1, 2, 3], ENDLESS, request_id="mine")
            task = asyncio.create_task(work)
            await (first.wait() if leave == "cancel stream" else until(lambda: num_open(model) == 2))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif leave == "break":
            async for _ in model.stream([1, 2, 3], ENDLESS):
                break
        elif leave == "aclose":
            async with aclosing(endless):
                await anext(endless)
        else:
            deltas = [await anext(endless)]
            model.abort("mine")
            model.abort("nobody's")
            deltas += [delta async for delta in endless]
            assert put_together(deltas)[3] == "abort"
            assert put_together(deltas)[1] == continued([1, 2, 3], 180)[: deltas[-1].usage.num_output_tokens]
        await until(lambda: num_open(model) <= 1)
        assert (await beside).token_ids == continued([40, 41], 180)

    running(echo, scenario)


def test_an_aborted_generate_gives_what_there_is(echo: Path) -> None:
    async def scenario(model: AsyncLLM) -> None:
        task = asyncio.create_task(model.generate([1, 2, 3], SamplingParams(max_tokens=180, n=2, ignore_eos=True), request_id="a"))
        await until(lambda: num_open(model))
        with pytest.raises(RequestError, match="in use"):
            await model.generate([1], request_id="a")
        model.abort("a")
        assert {part.finish_reason for part in (await task).completions} == {"abort"}
        assert (await model.generate([7, 8, 9], GREEDY, request_id="a")).token_ids == continued([7, 8, 9], 20)

    running(echo, scenario)


def test_a_request_that_fails_fails_alone() -> None:
    bad = SamplingParams(grammar=Grammar(kind=GrammarKind.REGEX, source="(("))
    fine = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    async def scenario(model: AsyncLLM) -> None:
        alone = await model.generate("a", fine)
        asked = [("a", fine), ("b", bad), ([10**9], fine), ([1.5], fine), ("c", {"n": 1})]
        told = await asyncio.gather(*(model.generate(*each) for each in asked), return_exceptions=True)
        assert told[0].token_ids == alone.token_ids
        assert [type(error) for error in told[1:]] == [RequestError] * 4
        for error, words in zip(told[1:], ("unclosed group", "vocabulary", "neither text", "SamplingParams"), strict=True):
            assert words in str(error)

    running(None, scenario)


@pytest.mark.parametrize("wrong", [-1, 1 << 32])
def test_a_token_that_cannot_be_is_refused_and_the_engine_goes_on(wrong: int) -> None:
    """A prompt's last token is looked up before the scheduler sees the prompt."""

    async def scenario(model: AsyncLLM) -> None:
        for refused in (model.generate([5, wrong]), model.embed([5, wrong])):
            with pytest.raises(RequestError, match=f"prompt has token id {wrong}, but the vocabulary has ids 0 to 4095"):
                await refused
        assert (await model.generate("The engine", GREEDY)).token_ids

    running(None, scenario)


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(echo: Path) -> None:
    async def scenario(model: AsyncLLM) -> None:
        runner = engine_of(model)._runner
        launch = runner.launch

        def fails(*args: Any, **named: Any) -> Any:
            runner.launch = launch
            raise ValueError("a bug of a kernel")

        runner.launch = fails
        with pytest.raises(EnginError, match="a bug of a kernel"):
            await model.generate([1, 2], ENDLESS)
        assert (await model.generate([7, 8, 9], GREEDY)).token_ids == continued([7, 8, 9], 20)

    running(echo, scenario)


def test_after_each_request_an_idle_engine_does_what_is_left_to_do(echo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures what it has learnt that loads will need, tells of its prefix cache, and looks after its ranks."""
    left, prepare = list[bool](), Engine.prepare
    monkeypatch.setattr(Engine, "prepare", lambda engine: left.append(prepare(engine)) or left[-1])

    async def scenario(model: AsyncLLM) -> None:
        await until(lambda: left and not left[-1])
        del left[:]
        await model.generate([5, 6], GREEDY)
        await until(lambda: left and not left[-1])

    running(echo, scenario)


def test_a_call_that_waits_is_answered_before_an_idle_engine_is_prepared(echo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph takes a tenth of a second to capture, by which the next of several requests in turn would begin later."""
    done, step, prepare = list[str](), Engine.step, Engine.prepare

    async def scenario(model: AsyncLLM) -> None:
        def last_step(engine: Engine) -> list[RequestOutput]:
            outputs = step(engine)
            if not engine.has_work:
                done.clear()
                model._thread._calls.put(lambda requests: done.append("called"))
            return outputs

        monkeypatch.setattr(Engine, "step", last_step)
        monkeypatch.setattr(Engine, "prepare", lambda engine: done.append("prepared") or prepare(engine))
        await model.generate([5, 6], GREEDY)
        await until(lambda: "called" in done and "prepared" in done)

    running(echo, scenario)
    assert done[0] == "called"


def test_an_engine_that_breaks_tells_everybody(echo: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(str(echo), load_format="dummy", **TINY) as model:
            engine = engine_of(model)

            def breaks(sizes: object) -> None:
                raise ValueError("the scheduler is broken")

            open_ones = [asyncio.create_task(model.generate([seed, 2], ENDLESS)) for seed in range(3)]
            await until(lambda: num_open(model) == 3)
            engine._scheduler.next_step = breaks
            told = await asyncio.gather(*open_ones, return_exceptions=True)
            assert all("the scheduler is broken" in str(error) for error in told)
            with pytest.raises(EnginError, match="the scheduler is broken"):
                await model.generate([1])

    asyncio.run(run())


def test_a_request_that_breaks_the_engine_before_it_is_taken_is_told_so(echo: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(str(echo), load_format="dummy", **TINY) as model, asyncio.timeout(PATIENCE_S):
            engine = engine_of(model)

            def breaks(request: object) -> None:
                raise ValueError("the queue is broken")

            engine.submit = breaks
            for _ in range(2):
                with pytest.raises(EnginError, match="the queue is broken"):
                    await model.generate([1, 2], GREEDY)

    asyncio.run(run())


def test_closing_ends_what_is_open_and_a_thread_is_never_left(echo: Path) -> None:
    async def run() -> None:
        model = AsyncLLM(str(echo), load_format="dummy", **TINY)
        task = asyncio.create_task(model.generate([1, 2, 3], ENDLESS))
        await until(lambda: num_open(model))
        await model.close()
        await model.close()
        with pytest.raises(EnginError, match="closed"):
            await task
        with pytest.raises(EnginError, match="closed"):
            await model.generate([1])

    asyncio.run(run())
    forgotten = AsyncLLM(str(echo), load_format="dummy", **TINY)
    thread = forgotten._thread._thread
    del forgotten
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert not [each for each in threading.enumerate() if each.name == "engine"]


def test_an_event_loop_that_ends_ends_its_requests_and_the_next_one_works(echo: Path) -> None:
    model = AsyncLLM(str(echo), load_format="dummy", **TINY)

    async def leave() -> None:
        stream = model.stream([1, 2, 3], ENDLESS)
        await anext(stream)
        left.append(stream)  # not closed by the garbage collector

    left: list[object] = []
    asyncio.run(leave())
    assert asyncio.run(model.generate([7, 8, 9], GREEDY)).token_ids == continued([7, 8, 9], 20)
    deadline = time.monotonic() + PATIENCE_S
    while num_open(model):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    asyncio.run(model.close())


def test_options_are_those_of_llm(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"AsyncLLM has no option 'page_sise'.*page_size"):
        AsyncLLM(page_sise=1)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Nobody"]}))
    with pytest.raises(EnginError, match="Nobody"):
        AsyncLLM(str(tmp_path))
