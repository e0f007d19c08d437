"""Guesses in a step: how many rows they may have, and whose pages."""

import msgspec
import pytest
from integrity import check_scheduler

from enginery.contracts.request import RequestOutput, TokenLogprob
from enginery.schedule import planner
from enginery.schedule.scheduler import Scheduler

from .device import Told, asked_of, output_of, settings_of
from .kinds_device import RandomGuesses, scheduler_of_kinds


class SameGuesses(RandomGuesses):
    """The same number of guesses for each request that decodes."""

    def __init__(self, count):
        self.count = count

    def some(self):
        return [7] * self.count


def run(scheduler):
    """A step, and how many guesses each of its requests has in it."""
    step = scheduler.next_step()
    scheduler.complete(step, Told((3,) if item.samples else () for item in step.items))
    check_scheduler(scheduler)
    return step, step.value.columns().num_drafts.tolist()


def decoding(count, num_prompt, *, guesses, max_tokens=40, **limits):
    """So many requests, each with one token behind its prompt, and every guess of each is wrong."""
    scheduler = scheduler_of_kinds(settings_of(**limits), drafting=SameGuesses(guesses))
    for name in range(count):
        scheduler.submit(asked_of(f"r{name}", [name + 10] * num_prompt, max_tokens=max_tokens, ignore_eos=True))
    run(scheduler)
    assert scheduler.num_running == count
    return scheduler


def test_nobody_is_preempted_for_a_guess(monkeypatch):
    """Pages of 4: each request has two, and they end behind its 8th token; one page is left for the two of them."""
    monkeypatch.setattr(planner, "HEADROOM_TOKENS", 0)
    scheduler = decoding(2, 6, guesses=3, page_size=4, num_pages=5)
    steps = [run(scheduler) for _ in range(6)]
    assert [drafts for _, drafts in steps] == [[3, 1], [3, 0], [3], [2], [1], [0]]  # then the last one sits out
    assert not any(step.preempted for step, _ in steps)


@pytest.mark.parametrize(
    ("limits", "drafts"), [({"max_batch_requests": 9}, 2), ({"max_batch_tokens": 9}, 2), ({"max_batch_requests": 18}, 5)]
)
def test_rows_are_as_many_as_are_sampled_and_computed_at_most(limits, drafts):
    """Of three requests, each with rows of its own."""
    step, found = run(decoding(3, 2, guesses=5, **limits))
    assert found == [drafts] * 3
    assert step.num_tokens == 3 * (1 + drafts)


def test_no_guess_is_verified_that_nothing_can_follow():
    assert run(decoding(1, 4, guesses=3, max_tokens=3))[1] == [1]


@pytest.mark.parametrize(("most", "coming"), [(16, 5), (3, 3)])
def test_of_prompts_those_that_wait_will_decode_too(monkeypatch, most, coming):
    told, drafting = [], SameGuesses(0)
    monkeypatch.setattr(drafting, "length", lambda requests, num_coming, num_tokens: told.append(num_coming) or 0)
    scheduler = scheduler_of_kinds(settings_of(max_batch_tokens=4, max_batch_requests=most), drafting=drafting)
    for name in range(5):
        scheduler.submit(asked_of(f"r{name}", [name + 10] * 4))
    run(scheduler)
    assert told == [coming]


def test_what_a_draft_model_did_not_follow_is_counted_anew_after_a_preemption():
    scheduler = decoding(1, 6, guesses=0)
    request = scheduler.table.preempt_last()
    run(scheduler)
    assert (request.num_computed, request.num_unfollowed) == (7, 3)  # one page was in the prefix cache


def test_a_prompt_has_what_rows_of_guesses_leave_of_a_step():
    scheduler = decoding(2, 4, guesses=5, max_batch_tokens=20)
    scheduler.submit(asked_of("late", range(100, 140)))
    step, drafts = run(scheduler)
    assert drafts == [5, 5, 0]
    assert [item.num_tokens for item in step.items] == [6, 6, 8]


def test_behind_wrong_guesses_that_led_over_a_page_s_end_plain_decoding_can_be_resumed_there():
    """Pages of 4. Behind its 7th token guesses lead to the 11th, and are wrong; it passes the 8th alone, and ends with the 12th."""
    guesses = SameGuesses(4)
    scheduler = scheduler_of_kinds(settings_of(), state_pages=12, drafting=guesses)
    scheduler.submit(asked_of("a", range(10, 16), max_tokens=6, ignore_eos=True))
    assert [run(scheduler)[1] for _ in range(3)] == [[0], [0], [4]]  # the prompt's last page ends amid it
    guesses.count = 0
    while scheduler.has_work:
        assert run(scheduler)[1] == [0]
    assert sorted(point.position for point in scheduler._kv.cache.points) == [4, 8]


@pytest.mark.parametrize(
    ("told", "params", "drafted", "accepted"),
    [
        ((5, 6, 7, 8), {}, 3, 3),
        ((5,), {}, 3, 0),
        ((5, 6, 1, 8), {"stop_token_ids": (1,)}, 3, 3),
        ((5, 1, 7, 8), {"stop_token_ids": (1,)}, 2, 2),
        ((5, 1), {"stop_token_ids": (1,)}, 3, 1),
        ((5, 6, 7, 8), {"max_tokens": 3}, 1, 1),
    ],
    ids=[
        "all right",
        "none right",
        "ended by the last guess",
        "ended before",
        "ended by the token behind them",
        "ended by its limit",
    ],
)
def test_guesses_behind_the_end_of_an_answer_are_neither_right_nor_wrong(told, params, drafted, accepted):
    scheduler = scheduler_of_kinds(settings_of(), drafting=SameGuesses(3))
    scheduler.submit(asked_of("r", [10] * 4, **{"max_tokens": 40, "ignore_eos": True} | params))
    run(scheduler)
    step = scheduler.next_step().value
    logprobs = tuple(TokenLogprob(token_id=token, logprob=-1.0) for token in told)
    given = msgspec.structs.replace(output_of(step, Told([told])), logprobs={0: logprobs})
    (output,) = Scheduler.complete(scheduler, step, given)
    assert (output.num_drafted, output.num_accepted) == (drafted, accepted)
    assert tuple(each.token_id for each in output.logprobs) == output.token_ids


def test_guesses_behind_a_stop_string_are_neither_too():
    """The text says where an answer ends: here behind so many of the step's four tokens, of which three were guessed."""
    output = RequestOutput(request_id="r", token_ids=(5, 6, 7, 8), num_drafted=3, num_accepted=3)
    assert [output.guesses(count) for count in (4, 3, 2, 1)] == [(3, 3), (3, 3), (2, 2), (1, 1)]
    wrong = RequestOutput(request_id="r", token_ids=(5,), num_drafted=3)
    assert wrong.guesses(1) == (3, 0)
