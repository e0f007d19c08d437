"""A step that fails, and what its requests and the others are told."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest
import torch
from integrity import check_scheduler

from enginery.config.schema import EngineOptions
from enginery.contracts.request import FinishReason, GenerationRequest, SamplingParams
from enginery.contracts.step import SamplingInput, StepInput
from enginery.engine.engine import MAX_FAILED_STEPS, Engine
from enginery.plugin.registry import Registry
from enginery.worker.paths.path import Launched
from enginery.worker.paths.running_step import RunningStep


def request(name: str, **params: object) -> GenerationRequest:
    sampling = SamplingParams(**{"max_tokens": 10, "temperature": 0.0, "ignore_eos": True} | params)
    return GenerationRequest(request_id=name, prompt_token_ids=(5, 6, 7), params=sampling)


@pytest.fixture
def engine() -> Engine:
    return Engine.build(EngineOptions(num_pages=32, max_model_len=128, overlap=True, num_threads=1), Registry.load())


class Lost:
    """A step whose tokens never come."""

    def wait(self) -> None:
        raise ValueError("no device")


def tokens_of(outputs: list) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def fail_when(engine: Engine, condition: Callable[[set[str]], bool], error: Exception) -> None:
    """Launching a step raises if `condition` holds of the ids of its requests."""
    launch = engine._runner.launch

    def failing(step: StepInput) -> Launched:
        if condition({request.request_id for request in engine._scheduler.requests}):
            raise error
        return launch(step)

    engine._runner.launch = failing


def run_until_it_fails(engine: Engine) -> tuple[Exception, list]:
    """The error, and the outputs until then."""
    outputs = []
    while True:
        try:
            outputs += engine.step()
        except Exception as error:
            return error, outputs


def test_what_came_in_the_call_that_failed_is_told_too(engine):
    """With a penalty each step waits for the tokens of the one before: so a's last token comes in the call whose launch fails."""
    engine.submit(request("a", max_tokens=3, frequency_penalty=0.5))
    engine.submit(request("b", frequency_penalty=0.5))
    fail_when(engine, lambda ids: ids == {"b"}, ValueError("no such shape"))
    error, before = run_until_it_fails(engine)
    told = engine.recover(error)
    tokens = [token for output in before + told if output.request_id == "a" for token in output.token_ids]
    assert len(tokens) == 3
    assert [output.finish_reason for output in told if output.request_id == "a"] == [FinishReason.LENGTH]
    (lost,) = [output for output in told if output.error is not None]
    assert lost.request_id == "b"
    assert "ValueError: no such shape; it ran" in lost.error
    assert re.search("enginery-attn-(cpu|torch)==", lost.error)


def test_steps_in_flight_are_given_up_and_the_memory_is_whole(engine):
    engine.submit(request("a"))
    fail_when(engine, lambda ids: bool(engine._in_flight), torch.OutOfMemoryError("none left"))
    error, _ = run_until_it_fails(engine)
    assert [output.request_id for output in engine.recover(error)] == ["a"]
    assert not engine.has_work
    check_scheduler(engine._scheduler)
    assert engine.meter.stats().num_failed_steps == 1


def test_a_step_that_is_scheduled_when_the_one_before_fails_is_given_up_with_it(engine):
    """With a penalty a step waits for the tokens of the one before after it was scheduled, and before it is launched."""
    engine.submit(request("a", frequency_penalty=0.5))
    engine.step()
    engine.submit(request("b"))
    engine._in_flight[0] = engine._in_flight[0]._replace(running=Lost())
    error, _ = run_until_it_fails(engine)
    assert sorted(output.request_id for output in engine.recover(error)) == ["a", "b"]
    assert not engine.has_work
    check_scheduler(engine._scheduler)
    engine.submit(request("c"))
    assert len(tokens_of(drain(engine))) == 10


def test_what_fails_every_time_is_raised_in_the_end_but_not_for_memory(engine):
    for error, patience in ((torch.OutOfMemoryError("none left"), 9), (KeyError("layer"), MAX_FAILED_STEPS - 1)):
        engine = Engine.build(EngineOptions(num_pages=32, max_model_len=128, num_threads=1), Registry.load())
        fail_when(engine, lambda ids: True, error)
        for number in range(patience):
            engine.submit(request(str(number)))
            assert len(engine.recover(run_until_it_fails(engine)[0])) == 1
    engine.submit(request("last"))
    failed, _ = run_until_it_fails(engine)
    with pytest.raises(KeyError):
        engine.recover(failed)


@pytest.mark.parametrize("error", [torch.AcceleratorError("an illegal memory access was encountered"), AssertionError("a bug")])
def test_what_is_beyond_a_step_is_raised(engine, error):
    engine.submit(request("a"))
    if isinstance(error, AssertionError):  # outside of the computation
        with pytest.raises(AssertionError):
            engine.recover(error)
        return
    fail_when(engine, lambda ids: True, error)
    failed, _ = run_until_it_fails(engine)
    with pytest.raises(torch.AcceleratorError):
        engine.recover(failed)


def test_nan_logits_end_their_request_alone(engine):
    sample, rows = engine._runner.sample, []

    def poisoned(launched: Launched, sampling: SamplingInput | None, cuts: Mapping[int, int]) -> RunningStep:
        rows.append(len(launched.logits))
        if rows == [2]:  # the prompts, in the order of their arrival
            with torch.inference_mode():
                launched.logits[0] = float("nan")
        return sample(launched, sampling, cuts)

    engine.submit(request("b"))
    alone = [token for output in drain(engine) for token in output.token_ids]
    engine._runner.sample = poisoned
    engine.submit(request("a", temperature=1.0))
    engine.submit(request("b"))
    outputs = drain(engine)
    assert [output.request_id for output in outputs if output.error is not None] == ["a"]
    assert [token for output in outputs if output.request_id == "b" for token in output.token_ids] == alone
    assert engine.meter.stats().num_nan == 1


def drain(engine: Engine) -> list:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def test_the_prefix_cache_can_be_flushed(engine):
    for _ in range(2):
        engine.submit(GenerationRequest(request_id="a", prompt_token_ids=tuple(range(5, 50)), params=SamplingParams(max_tokens=2)))
        outputs = drain(engine)
    assert outputs[0].num_cached_tokens == 32
    assert engine.flush_prefix_cache() > 0
    stats = engine.meter.stats()
    assert (stats.free_pages, stats.cached_pages) == (32, 0)


def test_a_trace_can_be_asked_for_while_running(engine, tmp_path):
    engine.meter._trace_file = tmp_path / "steps.json"
    assert engine.meter.profile(3) == str(tmp_path / "steps.json")
    engine.submit(request("a"))
    drain(engine)
    assert (tmp_path / "steps.json").exists()
    assert sum(engine.meter.stats().steps_by_size) == engine.meter.stats().num_steps
    assert sum(engine.meter.stats().steps_by_size[1:]) == 1, "the prompt's step alone is of several tokens"
