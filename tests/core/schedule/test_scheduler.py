"""The scheduler's rules one by one. `run_step` checks after each step that all keys and values read are the reader's own."""

import sys
from collections.abc import Callable
from itertools import groupby
from time import thread_time

import pytest
from integrity import check_scheduler

from enginery.contracts.request import FinishReason
from enginery.contracts.schedule import QueuedFacts, SchedulePolicySpec
from enginery.errors import QueueFull, RequestError

from .device import EOS, PRIORITY, asked_of, run_step, scheduler_of, shape
from .scheduler_runs import finish, running_of

# What may enter


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="the prompt is empty"):
        scheduler_of().submit(asked_of("a", []))


def test_a_prompt_that_leaves_no_room_to_generate_is_refused_with_both_numbers():
    scheduler = scheduler_of(max_model_len=8)
    with pytest.raises(RequestError, match=r"the prompt has 8 tokens, but at most 7 fit"):
        scheduler.submit(asked_of("a", range(8)))
    scheduler.submit(asked_of("b", range(7)))


def test_a_prompt_that_is_only_read_may_fill_the_context_and_the_pool():
    scheduler, device = running_of(asked_of("a", range(8), prompt_only=True, max_tokens=1), max_model_len=8, num_pages=2)
    assert finish(scheduler, device) == {"a": ([1], FinishReason.LENGTH)}
    with pytest.raises(RequestError, match=r"the prompt has 9 tokens, but at most 8 fit \(max_model_len 8\);"):
        scheduler.submit(asked_of("b", range(9), prompt_only=True, max_tokens=1))


def test_a_prompt_that_needs_more_pages_than_there_are_is_refused_with_both_numbers():
    with pytest.raises(RequestError, match="the prompt of 9 tokens needs 3 KV pages, but the engine has 2 of 4 tokens"):
        scheduler_of(num_pages=2).submit(asked_of("a", range(9)))


def test_a_request_id_in_use_is_refused_and_free_again_afterwards():
    scheduler, device = running_of(asked_of("a", [5]))
    with pytest.raises(RequestError, match="the request id 'a' is in use"):
        scheduler.submit(asked_of("a", [6]))
    finish(scheduler, device)
    scheduler.submit(asked_of("a", [6]))


@pytest.mark.parametrize(("prompt", "wrong"), [([7, 2**40], 2**40), ([-1], -1), ([99, 100], 100), ([100, 2**40], 100)])
def test_a_prompt_token_that_is_not_in_the_vocabulary_is_refused(prompt, wrong):
    with pytest.raises(RequestError, match=f"^prompt has token id {wrong}, but the vocabulary has ids 0 to 99$"):
        scheduler_of(vocab_size=100).submit(asked_of("a", prompt))


def test_a_prompt_token_that_is_no_integer_is_refused():
    with pytest.raises(RequestError, match="no token id"):
        scheduler_of().submit(asked_of("a", [1, "2"]))


def test_one_request_too_many_is_told_to_retry():
    scheduler, _ = running_of(asked_of("a", [5]), max_queued_requests=1)
    why = r"1 requests are waiting, .* allows \(1\); retry in a few seconds, a body of more than that in parts"
    with pytest.raises(QueueFull, match=why):
        scheduler.submit(asked_of("b", [5]))
    assert scheduler.num_waiting == 1


# What a step holds


def test_nothing_to_do_is_an_empty_step():
    scheduler = scheduler_of()
    assert scheduler.next_step().items == ()
    assert not scheduler.has_work


def test_decoding_requests_come_first_then_prompt_chunks_under_the_token_budget():
    scheduler, device = running_of(asked_of("a", range(10, 13)), max_batch_tokens=8)
    run_step(scheduler, device)
    scheduler.submit(asked_of("b", range(20, 40)))
    step, _ = run_step(scheduler, device)
    assert shape(step) == [("a", 1), ("b", 7)]
    assert (step.num_decode, step.num_prefill_tokens, step.num_tokens) == (1, 7, 8)
    assert [item.num_logits for item in step.items] == [1, 0]
    assert [shape(run_step(scheduler, device)[0]) for _ in range(2)] == [[("a", 1), ("b", 7)], [("a", 1), ("b", 6)]]


def test_prompts_in_progress_go_before_new_ones():
    scheduler, device = running_of(asked_of("a", range(10, 22)), asked_of("b", range(30, 36)), max_batch_tokens=8)
    assert [shape(run_step(scheduler, device)[0]) for _ in range(2)] == [[("a", 8)], [("a", 4), ("b", 4)]]


def test_no_more_requests_run_than_max_batch_requests():
    scheduler, device = running_of(*(asked_of(name, [ord(name)]) for name in "abc"), max_batch_requests=2)
    assert shape(run_step(scheduler, device)[0]) == [("a", 1), ("b", 1)]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_the_policy_decides_who_is_admitted_first():
    requests = [asked_of("late", [5], priority=3), asked_of("soon", [6], priority=1), asked_of("next", [7], priority=1)]
    scheduler, device = running_of(*requests, policy=PRIORITY, max_batch_requests=2)
    assert shape(run_step(scheduler, device)[0]) == [("soon", 1), ("next", 1)]


def test_a_policy_sees_the_facts_of_a_request():
    seen = []
    policy = SchedulePolicySpec(name="spy", api=(2, 0), key=lambda facts: seen.append(facts) or (), summary="")
    running_of(asked_of("a", [5, 6], priority=4, salt="ours"), policy=policy)
    assert seen == [QueuedFacts(request_id="a", priority=4, num_tokens=2, arrival_s=0.0, salt="ours")]


def test_prompt_logprobs_get_logits_for_every_prompt_row_and_no_prefix_hit():
    scheduler, device = running_of(asked_of("a", range(10, 20)))
    finish(scheduler, device)
    scheduler.submit(asked_of("b", range(10, 20), prompt_logprobs=1))
    step, results = run_step(scheduler, device)
    assert [(item.start, item.num_tokens, item.num_logits) for item in step.items] == [(0, 10, 10)]
    assert results[0].request.num_cached_tokens == 0
    assert [item.num_logits for item in run_step(scheduler, device)[0].items] == [1]
    finish(scheduler, device)


def test_a_chunk_of_one_token_gets_logits_for_prompt_logprobs_too():
    scheduler, device = running_of(asked_of("a", range(10, 13), prompt_logprobs=0, max_tokens=1), max_batch_tokens=1)
    assert [run_step(scheduler, device)[0].items[0].num_logits for _ in range(3)] == [1, 1, 1]


# How requests end


@pytest.mark.parametrize(
    ("params", "token", "expected"),
    [
        ({"max_tokens": 3}, 1, ([1, 1, 1], FinishReason.LENGTH)),
        ({"max_tokens": 99}, 1, ([1] * 6, FinishReason.LENGTH)),
        ({}, EOS, ([EOS], FinishReason.STOP)),
        ({"min_tokens": 2}, EOS, ([EOS] * 2, FinishReason.STOP)),
        ({"max_tokens": 3, "ignore_eos": True}, EOS, ([EOS] * 3, FinishReason.LENGTH)),
        ({"stop_token_ids": (1,)}, 1, ([1], FinishReason.STOP)),
        ({"stop_token_ids": (1,), "ignore_eos": True, "min_tokens": 2}, 1, ([1] * 2, FinishReason.STOP)),
        ({"max_tokens": 1}, EOS, ([EOS], FinishReason.STOP)),
    ],
)
def test_a_request_ends_by_its_stop_tokens_or_its_length(params, token, expected):
    scheduler, device = running_of(asked_of("a", [5, 6], **params), max_model_len=8)
    assert finish(scheduler, device, token) == {"a": expected}


def test_a_small_pool_clamps_max_tokens_to_what_it_holds():
    scheduler, device = running_of(asked_of("a", [5, 6], max_tokens=99), num_pages=2)
    assert finish(scheduler, device) == {"a": ([1] * 7, FinishReason.LENGTH)}


def test_the_stop_token_is_reported():
    scheduler, device = running_of(asked_of("a", [5]), asked_of("b", [6], max_tokens=1))
    _, (first, second) = run_step(scheduler, device, EOS)
    assert (first.stop_token_id, second.stop_token_id) == (EOS, EOS)
    scheduler.submit(asked_of("c", [5], max_tokens=1))
    assert run_step(scheduler, device, 1)[1][0].stop_token_id is None
    scheduler.submit(asked_of("d", [5], min_tokens=2))
    assert [run_step(scheduler, device, EOS)[1][0].stop_token_id for _ in range(2)] == [None, EOS]


# Failures


def test_a_failed_step_ends_its_requests_and_nobody_elses():
    scheduler, device = running_of(asked_of("a", range(10, 20)), max_batch_requests=1)
    scheduler.submit(asked_of("b", range(10, 20)))
    step = scheduler.next_step()
    device.spoil(device.launch(step, lambda: 1))
    assert [request.request_id for request in scheduler.fail(step)] == ["a"]
    assert scheduler.cached_pages == 0
    assert list(finish(scheduler, device)) == ["b"]


def test_one_request_of_a_step_can_end():
    scheduler, device = running_of(asked_of("a", [5]), asked_of("b", [6]))
    run_step(scheduler, device)
    assert scheduler.abort("a")
    assert not scheduler.abort("gone")
    assert list(finish(scheduler, device)) == ["b"]


def test_steps_that_come_back_out_of_order_are_a_bug():
    scheduler, device = running_of(asked_of("a", [5]))
    first = scheduler.next_step()
    device.launch(first, lambda: 1)
    second = scheduler.next_step()
    with pytest.raises(AssertionError, match="in the order they were scheduled in"):
        scheduler.complete(second, [1])


# Steps in flight


def test_the_next_step_can_be_scheduled_before_its_input_is_known():
    scheduler, device = running_of(asked_of("a", [5, 6], max_tokens=3))
    first = scheduler.next_step()
    second_launch = None
    first_launch = device.launch(first, lambda: 7)
    second = scheduler.next_step()
    second_launch = device.launch(second, lambda: 8)
    assert [(item.start, item.num_tokens, item.input_pending) for item in second.items] == [(2, 1, True)]
    assert [result.token_id for result in scheduler.complete(first, first_launch.sampled)] == [7]
    assert [result.token_id for result in scheduler.complete(second, second_launch.sampled)] == [8]
    assert not scheduler.next_step().items[0].input_pending


def test_a_request_that_is_sure_to_end_in_the_step_in_flight_is_not_scheduled_again():
    scheduler, device = running_of(asked_of("a", [5], max_tokens=1))
    device.launch(scheduler.next_step(), lambda: 1)
    assert scheduler.next_step().items == ()
    assert scheduler.has_work


def test_what_a_later_step_samples_for_an_ended_request_is_dropped_and_its_pages_come_back_then():
    scheduler, device = running_of(asked_of("a", range(10, 14)), prefix_cache=False)
    first = device.launch(scheduler.next_step(), lambda: EOS)
    second = device.launch(scheduler.next_step(), lambda: 9)
    (result,) = scheduler.complete(first.step, first.sampled)
    assert result.finish_reason is FinishReason.STOP
    assert scheduler.free_pages == 62
    assert scheduler.complete(second.step, second.sampled) == []
    assert list(result.request.token_ids) == [10, 11, 12, 13, EOS]
    assert scheduler.free_pages == 64


# Speed


def test_scheduling_256_decoding_requests_takes_little_time():
    scheduler, device = running_of(
        *(asked_of(f"r{n}", range(n, n + 20), max_tokens=100) for n in range(256)),
        num_pages=4096,
        page_size=16,
        max_batch_tokens=8192,
        max_batch_requests=256,
        max_queued_requests=1000,
    )
    device.launch(step := scheduler.next_step(), lambda: 1)
    scheduler.complete(step, [1] * 256)
    scheduled, completed = [], []
    for _ in range(20):
        began = thread_time()
        step = scheduler.next_step()
        launched = thread_time()
        scheduler.complete(step, [1] * 256)
        scheduled.append(launched - began)
        completed.append(thread_time() - launched)
    assert step.num_decode == 256
    assert min(scheduled) < 0.02
    assert min(completed) < 0.02
    steps = []
    assert calls_of(lambda: steps.append(scheduler.next_step())) < 40 * 256
    assert calls_of(lambda: scheduler.complete(steps[0], [1] * 256)) < 20 * 256


def calls_of(work: Callable[[], None]) -> int:
    """Calls of functions, which are as many on every machine."""
    events, usual = [], sys.getprofile()
    sys.setprofile(lambda frame, event, arg: events.append(event))
    try:
        work()
    finally:
        sys.setprofile(usual)
    return events.count("call") + events.count("c_call")


# Who stands where in a step


def decoding_order(scheduler, device, *, steps=6):
    """Ids of the decoding requests of the last of some steps."""
    for _ in range(steps):
        step, _ = run_step(scheduler, device, 1)
    return [item.request.request_id for item in step.items[: step.num_decode]]


def test_decoding_requests_that_begin_with_the_same_pages_stand_side_by_side():
    families = {name: [number * 100 + place for place in range(70)] for number, name in enumerate("abc", 1)}
    asked = [asked_of(f"{name}{number}", [*families[name], number], max_tokens=40) for number in range(3) for name in "bac"]
    scheduler, device = running_of(*asked, num_pages=400, page_size=4, max_batch_tokens=700)
    order = decoding_order(scheduler, device)
    assert len(order) == 9
    families_in_order = [name[0] for name in order]
    assert len(list(groupby(families_in_order))) == 3
    check_scheduler(scheduler)
    finish(scheduler, device)
