"""Slots for recurrent states: one for each request that has pages, none for anybody else, back when its pages are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import check_scheduler

from .device import EOS, FakeDevice, asked_of, run_step, scheduler_of


def slots_of(step):
    """{request id: slot}; no two requests of a step have the same."""
    slots = {item.request.request_id: item.request.kv.seat for item in step.items}
    assert len(set(slots.values())) == len(slots)
    return slots


def started(*names, **changes):
    scheduler = scheduler_of(**changes)
    for name in names:
        scheduler.submit(asked_of(name, [ord(name)] * 3))
    return scheduler, FakeDevice(4)


def test_every_request_of_a_step_has_a_slot_of_its_own_and_keeps_it():
    scheduler, device = started("a", "b", "c", max_batch_requests=4)
    first = slots_of(run_step(scheduler, device)[0])
    assert set(first.values()) <= set(range(4))
    assert [slots_of(run_step(scheduler, device)[0]) for _ in range(3)] == [first] * 3


def test_a_slot_is_given_back_at_the_end_and_to_the_next_request():
    scheduler, device = started("a", "b", max_batch_requests=2)
    first = slots_of(run_step(scheduler, device)[0])
    scheduler.submit(asked_of("c", [5]))
    run_step(scheduler, device, EOS)
    assert slots_of(run_step(scheduler, device)[0])["c"] in first.values()


def test_an_aborted_request_leaves_its_slot():
    scheduler, device = started("a", "b", max_batch_requests=2)
    freed = slots_of(run_step(scheduler, device)[0])["a"]
    scheduler.abort("a")
    check_scheduler(scheduler)
    scheduler.submit(asked_of("c", [5]))
    assert slots_of(run_step(scheduler, device)[0])["c"] == freed


def test_a_slot_stays_taken_while_a_step_is_in_flight_that_writes_to_it():
    scheduler, device = started("a", max_batch_requests=1)
    step = scheduler.next_step()
    launched = device.launch(step, lambda: 1)
    scheduler.abort("a")
    scheduler.submit(asked_of("b", [5]))
    assert scheduler.next_step().items == ()
    scheduler.complete(step, launched.sampled)
    assert slots_of(run_step(scheduler, device)[0]) == {"b": slots_of(step)["a"]}


def test_a_preempted_request_begins_again_from_its_first_token():
    scheduler, device = started(num_pages=20, prefix_cache=False)
    for name in "ab":
        scheduler.submit(asked_of(name, [ord(name)] * 4, max_tokens=60))
    begun = {"a": 0, "b": 0}
    preempted = []
    while scheduler.has_work:
        step, _ = run_step(scheduler, device)
        slots_of(step)
        preempted += step.preempted
        for item in step.items:
            begun[item.request.request_id] += item.start == 0
    assert preempted == ["b"]
    assert begun == {"a": 1, "b": 2}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_slot_is_lost_or_shared_however_requests_come_and_go(data):
    scheduler, device = scheduler_of(num_pages=12, max_batch_requests=3, prefix_cache=data.draw(st.booleans())), FakeDevice(4)
    alive = []
    for number in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["submit", "step", "step", "abort"])):
            case "submit":
                scheduler.submit(
                    asked_of(str(number), range(data.draw(st.integers(1, 20))), max_tokens=data.draw(st.integers(1, 12)))
                )
                alive.append(str(number))
            case "abort" if alive:
                scheduler.abort(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
            case _:
                step = scheduler.next_step()
                slots_of(step)
                if step.items:
                    scheduler.complete(step, device.launch(step, lambda: data.draw(st.sampled_from([1, EOS]))).sampled)
        check_scheduler(scheduler)
    while scheduler.has_work:
        run_step(scheduler, device)
    assert sorted(scheduler._kv.free_seats) == [0, 1, 2]


def test_two_requests_with_one_slot_are_found():
    scheduler, device = started("a", "b", max_batch_requests=2)
    step, _ = run_step(scheduler, device)
    step.items[0].request.kv.seat = step.items[1].request.kv.seat
    with pytest.raises(AssertionError, match="two requests own one state"):
        check_scheduler(scheduler)
