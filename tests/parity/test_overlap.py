"""A step that is launched before the tokens of the one before have come back changes no token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from integrity import check_scheduler
from pairwise import in_turn
from parity.engine_driver import assert_cut_up, assert_greedy, drain, generate, greedy, options
from parity.oracle import FAMILIES, Oracle

from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry


@in_turn(
    ("changes", [{}, {"max_batch_tokens": 16}, {"num_pages": 14}, {"prefix_cache": False}]), ("family", ["llama", "deepseek-v2"])
)
def test_overlapped_steps_give_transformers_tokens(
    write_oracle: Callable[..., Oracle], registry: Registry, family: str, changes: dict[str, object]
) -> None:
    oracle = write_oracle(family, FAMILIES[family])
    assert_cut_up(oracle, registry, {"overlap": True, **changes})


def test_results_come_one_step_late_and_inputs_are_pending(llama: Oracle, registry: Registry) -> None:
    engine = Engine.build(options(llama, overlap=True), registry)
    engine.submit(greedy("a", llama.prompts[0]))
    assert engine.step() == []
    launched = engine._in_flight[0].step
    (first,) = engine.step()
    assert len(first.token_ids) == 1
    (following,) = engine._in_flight[0].step.each()
    assert launched.each()[0].samples
    assert following.pending == 1
    assert_greedy(llama, [drain(engine, {"a": list(first.token_ids)})["a"]], llama.prompts[:1])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.7, "top_p": 0.8, "seed": 4},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.8, "presence_penalty": 0.2},
        {"min_tokens": 6},
        {"logprobs": 3},
        {"prompt_logprobs": 2},
    ],
    ids=str,
)
def test_overlap_samples_what_a_step_at_a_time_samples(llama: Oracle, registry: Registry, params: dict[str, object]) -> None:
    answers = []
    for overlap in (False, True):
        engine = Engine.build(options(llama, overlap=overlap), registry)
        for index, prompt in enumerate(llama.prompts):
            engine.submit(greedy(str(index), prompt, **{"max_tokens": 12, "ignore_eos": False, **params}))
        outputs: dict[str, list[object]] = {}
        while engine.has_work:
            for output in engine.step():
                said = (output.token_ids, output.finish_reason, output.prompt_logprobs, output.logprobs)
                outputs.setdefault(output.request_id, []).append(said)
        answers.append(outputs)
    for request_id, expected in answers[0].items():
        assert [said[:2] for said in answers[1][request_id]] == [said[:2] for said in expected]
        for (*_, mine), (*_, theirs) in zip(answers[1][request_id], expected, strict=True):
            assert (mine is None) == (theirs is None)
            for got, wanted in zip(mine or (), theirs or (), strict=True):
                assert got.token_id == wanted.token_id
                assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def test_what_is_sampled_past_an_end_is_dropped_and_the_memory_is_whole(llama: Oracle, registry: Registry) -> None:
    engine = Engine.build(options(llama, overlap=True), registry)
    expected = llama.continue_greedily(llama.prompts[0], 5)
    engine.submit(greedy("a", llama.prompts[0], stop_token_ids=(expected[4],)))
    first = expected.index(expected[4])
    assert drain(engine, {})["a"] == expected[: first + 1]
    engine._scheduler.check_idle()


def test_aborts_between_launch_and_result_are_honoured(llama: Oracle, registry: Registry) -> None:
    engine = Engine.build(options(llama, overlap=True), registry)
    for name, prompt in zip("abc", llama.prompts, strict=False):
        engine.submit(greedy(name, prompt))
    tokens: dict[str, list[int]] = {}
    for output in [*engine.step(), *engine.step()]:
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
    engine.abort("b")
    drain(engine, tokens)
    assert set(tokens) <= {"a", "b", "c"}
    assert_greedy(llama, [tokens["a"], tokens["c"]], [llama.prompts[0], llama.prompts[2]])
    assert "b" not in {output.request_id for output in engine.step()}
    engine._scheduler.check_idle()


def test_a_failed_step_gives_up_those_in_flight_and_the_next_call_works(
    llama: Oracle, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.build(options(llama, overlap=True), registry)
    engine.submit(greedy("a", llama.prompts[0]))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner.parts.model, "forward", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError) as caught:
            engine.step()
    assert "in step" in caught.value.__notes__[0]
    assert not engine.has_work
    check_scheduler(engine._scheduler)
    assert_greedy(llama, generate(engine, llama.prompts[:2]), llama.prompts[:2])


def test_defaults_overlap_on_a_device_only(llama: Oracle, registry: Registry) -> None:
    assert Engine.build(options(llama), registry)._overlap == 0
