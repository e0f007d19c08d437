"""What the scheduler does with pages: shared, kept, evicted, taken from whoever is last, given back."""

from integrity import check_scheduler
from msgspec import structs

from enginery.contracts.request import TokenLogprob
from enginery.schedule.scheduler import Scheduler

from .device import asked_of, output_of, run_step, scheduler_of, shape
from .scheduler_runs import finish, running_of

# The prefix cache


def test_a_finished_request_leaves_its_pages_to_the_next_one():
    scheduler, device = running_of(asked_of("a", range(10, 20), max_tokens=7))
    finish(scheduler, device)
    assert scheduler.cached_pages == 4
    scheduler.submit(asked_of("b", [*range(10, 20), 1, 1, 1, 1]))
    step, results = run_step(scheduler, device)
    assert (step.items[0].start, step.items[0].num_tokens, results[0].request.num_cached_tokens) == (12, 2, 12)


def test_a_prompt_is_shared_as_soon_as_its_chunks_are_computed():
    scheduler, device = running_of(asked_of("a", range(10, 30)), max_batch_tokens=8)
    run_step(scheduler, device)
    assert scheduler.cached_pages == 2


def test_requests_with_one_prefix_wait_for_the_first_to_compute_it():
    prefix = list(range(10, 26))
    scheduler, device = running_of(*(asked_of(name, [*prefix, ord(name)]) for name in "abc"))
    assert shape(run_step(scheduler, device)[0]) == [("a", 17)]
    assert shape(run_step(scheduler, device)[0]) == [("a", 1), ("b", 1), ("c", 1)]


def test_nobody_waits_for_a_page_that_a_prompt_s_last_token_alone_fills():
    scheduler, device = running_of(asked_of("a", range(10, 18)), max_batch_tokens=7)
    run_step(scheduler, device)
    scheduler.submit(asked_of("b", range(10, 20)))
    assert shape(run_step(scheduler, device)[0]) == [("a", 1), ("b", 6)]


def test_with_the_prefix_cache_off_nobody_waits_and_nothing_is_kept():
    prefix = list(range(10, 26))
    scheduler, device = running_of(*(asked_of(name, [*prefix, ord(name)]) for name in "abc"), prefix_cache=False)
    assert shape(run_step(scheduler, device)[0]) == [("a", 17), ("b", 17), ("c", 17)]
    finish(scheduler, device)
    assert (scheduler.cached_pages, scheduler.free_pages) == (0, 64)


def test_a_page_computed_twice_is_kept_until_its_request_ends():
    scheduler, device = running_of(asked_of("a", range(10, 18)), asked_of("b", range(10, 18), prompt_logprobs=0))
    run_step(scheduler, device)
    assert scheduler.cached_pages == 2
    assert scheduler.free_pages == 60
    finish(scheduler, device)


def test_different_salts_share_nothing():
    scheduler, device = running_of(asked_of("a", range(10, 20), salt="x"))
    finish(scheduler, device)
    scheduler.submit(asked_of("b", range(10, 20), salt="y"))
    assert run_step(scheduler, device)[0].items[0].start == 0


# Short memory


def test_a_decode_without_a_page_preempts_the_last_request_in_order():
    scheduler, device = running_of(
        asked_of("a", range(10, 14), max_tokens=60),
        asked_of("b", range(20, 24), max_tokens=60),
        num_pages=20,
        prefix_cache=False,
    )
    preempted = []
    for _ in range(200):
        step, _ = run_step(scheduler, device)
        preempted += step.preempted
        if not scheduler.has_work:
            break
    assert preempted == ["b"]
    assert scheduler.free_pages == 20


def test_a_preempted_request_keeps_its_tokens_and_its_place():
    scheduler, device = running_of(
        asked_of("a", range(10, 14), max_tokens=60), asked_of("b", range(20, 24), max_tokens=60), num_pages=20
    )
    while not run_step(scheduler, device)[0].preempted:
        pass
    scheduler.submit(asked_of("c", [5]))
    ended = finish(scheduler, device)
    assert list(ended) == ["a", "b", "c"] or list(ended) == ["a", "c", "b"]
    assert {name: len(output) for name, (output, _) in ended.items()} == {"a": 60, "b": 60, "c": 8}


def test_what_a_preempted_request_finds_of_its_own_is_not_told_as_cached():
    scheduler, device = running_of(asked_of("a", range(10, 20)))
    run_step(scheduler, device)
    request = scheduler.table.preempt_last()
    (item,) = run_step(scheduler, device)[0].items
    assert (item.start, request.num_cached_tokens) == (8, 0)


def test_prompt_logprobs_of_a_prompt_that_is_begun_anew_are_told_once():
    scheduler = scheduler_of(max_batch_tokens=4)
    scheduler.submit(asked_of("a", range(10, 16), max_tokens=1, prompt_logprobs=0))
    for count, token, is_preempted in ((4, None, True), (4, None, False), (1, 5, False)):
        step = scheduler.next_step().value
        output = structs.replace(output_of(step, [token]), prompt_logprobs={0: [TokenLogprob(token_id=1, logprob=-1.0)] * count})
        told = Scheduler.complete(scheduler, step, output)
        if is_preempted:
            scheduler.table.preempt_last()
    assert [len(output.prompt_logprobs) for output in told] == [6]


def test_cached_pages_are_evicted_before_anybody_is_preempted():
    scheduler, device = running_of(asked_of("old", range(10, 40)), num_pages=10)
    finish(scheduler, device)
    assert scheduler.cached_pages == 9
    scheduler.submit(asked_of("new", range(50, 80)))
    assert not any(run_step(scheduler, device)[0].preempted for _ in range(8))
    assert not scheduler.has_work


def test_no_more_cached_pages_are_evicted_than_are_lacking():
    scheduler, device = running_of(asked_of("old", range(10, 40)), num_pages=10)
    finish(scheduler, device)
    scheduler.submit(asked_of("new", range(50, 58), max_tokens=1))
    run_step(scheduler, device)
    assert (scheduler.free_pages, scheduler.cached_pages) == (0, 10)


def test_nobody_passes_a_head_of_the_queue_that_does_not_fit():
    scheduler, device = running_of(asked_of("a", range(10, 18), max_tokens=20), num_pages=16)
    run_step(scheduler, device)
    scheduler.submit(asked_of("large", range(100, 140)))
    scheduler.submit(asked_of("small", [5]))
    while scheduler.num_running == 1:
        step, _ = run_step(scheduler, device)
        assert "small" not in dict(shape(step))
    finish(scheduler, device)


def test_admission_leaves_room_for_those_who_run():
    scheduler, device = running_of(asked_of("a", range(10, 14), max_tokens=40), num_pages=12)
    run_step(scheduler, device)
    scheduler.submit(asked_of("b", range(20, 36)))
    assert shape(run_step(scheduler, device)[0]) == [("a", 1)]  # 4 pages for b would be there, but not the headroom beside them


# Aborts


def test_an_abort_gives_all_pages_back_at_every_stage():
    for num_steps in range(6):
        scheduler, device = running_of(asked_of("a", range(10, 30), max_tokens=4), max_batch_tokens=8)
        for _ in range(num_steps):
            run_step(scheduler, device)
        assert scheduler.abort("a")
        check_scheduler(scheduler)
        assert not scheduler.abort("a")
        assert not scheduler.has_work
        assert scheduler.free_pages + scheduler.cached_pages == 64


def test_pages_of_a_request_aborted_in_flight_come_back_when_the_step_completes():
    scheduler, device = running_of(asked_of("a", range(10, 20)), prefix_cache=False)
    step = scheduler.next_step()
    launched = device.launch(step, lambda: 1)
    assert scheduler.abort("a")
    assert scheduler.free_pages == 61
    assert scheduler.complete(step, launched.sampled) == []
    assert scheduler.free_pages == 64
