"""Which resume points requests leave behind, and which of them go first when memory is short."""

from array import array

import pytest
from integrity import check_scheduler

from enginery.contracts.batch import STATE
from enginery.kv.kinds import NOTHING
from enginery.kv.manager import SequenceKV

from .device import asked_of, settings_of
from .kinds_device import KindsDevice, scheduler_of_kinds

PROMPT = list(range(3, 13))  # 10 tokens, its last page but one ends at 8


class Turns:
    """Requests one after the other, and what each was found in the prefix cache.

    kinds: `window`, `state` or both; `amid`: states are also kept amid items of prompts.
    """

    def __init__(self, kinds, *, state_pages=12, window_pages=40, **changes):
        self.settings = settings_of(**changes)
        window = 5 if "window" in kinds else None
        self.scheduler = scheduler_of_kinds(
            self.settings,
            window=window,
            window_pages=window_pages if window else 0,
            state_pages=state_pages if "state" in kinds else None,
            within_items="amid" in kinds,
        )
        self.device = KindsDevice(self.scheduler, self.settings, window=window)
        self.points = self.scheduler._kv.cache.points
        self.count = 0

    def ask(self, prompt, num_tokens, *, seed=20):
        """The answer is `seed`, `seed` + 1 and so on. Returns prompt and answer, and how many tokens were in the cache."""
        self.count += 1
        self.scheduler.submit(asked_of(f"r{self.count}", prompt, max_tokens=num_tokens, ignore_eos=True))
        request, answer = self.scheduler.table.by_id[f"r{self.count}"], iter(range(seed, seed + num_tokens))
        self.num_prompt_steps = 0
        while self.scheduler.has_work:
            step = self.scheduler.next_step()
            self.num_prompt_steps += step.value.num_decode == 0
            self.scheduler.complete(step, self.device.launch(step, lambda: next(answer)))
            check_scheduler(self.scheduler)
            self.device.check_points()
        return list(request.token_ids), request.num_cached_tokens

    @property
    def found(self):
        """By position, whether the points there go first."""
        return sorted((point.position, "first" if point.passing else "last") for point in self.points)


EACH_KIND = pytest.mark.parametrize(
    "kinds", [("window",), ("state",), ("window", "state"), ("state", "amid"), ("window", "state", "amid")]
)


@EACH_KIND
def test_behind_an_answer_the_end_of_its_prompt_goes_first(kinds):
    turns = Turns(kinds)
    turns.ask(PROMPT, 8)
    assert turns.found == [(8, "first"), (16, "last")]


def test_decoding_looks_at_points_where_one_was_passed_alone(monkeypatch):
    """At each page's end, once it is written; what looks at all of them in each step is what hundreds of requests wait for."""
    turns, looked = Turns(("state",)), list[int]()
    offer = turns.scheduler.table.offer
    monkeypatch.setattr(
        turns.scheduler.table,
        "offer",
        lambda request, *, is_prompt: (looked.append(request.kv.num_written), offer(request, is_prompt=is_prompt)),
    )
    turns.ask(PROMPT, 12)
    assert looked == [8, 10, 12, 16, 20]
    assert turns.found == [(8, "first"), (20, "last")]


@EACH_KIND
def test_behind_a_next_turn_the_end_of_the_one_before_goes_first(kinds):
    turns = Turns(kinds)
    told, _ = turns.ask(PROMPT, 8)
    _, num_cached = turns.ask([*told, 40, 41, 42, 43], 8, seed=50)
    assert num_cached == 16
    assert turns.found == [(8, "first"), (16, "first"), (20, "first"), (28, "last")]


@EACH_KIND
def test_where_a_second_one_goes_on_does_not_go_first_again(kinds):
    turns = Turns(kinds)
    told, _ = turns.ask(PROMPT, 8)
    for count, prompt in ((8, PROMPT), (8, PROMPT), (16, [*told, 40, 41]), (16, [*told, 44, 45]), (16, [*told, 46, 47])):
        assert turns.ask(prompt, 8, seed=20 if prompt is PROMPT else prompt[-1])[1] == count
    assert {(8, "last"), (16, "last")} <= set(turns.found)


@EACH_KIND
def test_where_nothing_is_further_along_nothing_goes_first(kinds):
    turns = Turns(kinds)
    turns.ask(PROMPT, 2)
    assert turns.found == [(8, "last")]


@EACH_KIND
def test_a_hit_refreshes_the_point_that_was_used_and_none_on_the_way_to_it(kinds):
    turns, other = Turns(kinds), [*range(50, 60)]
    longer = [*PROMPT, *range(30, 38)]
    for prompt in (PROMPT, longer, other):
        turns.ask(prompt, 1)
    short, long, others = turns.points
    assert (short.position, long.position, others.position) == (8, 16, 8)
    assert turns.ask(longer, 1)[1] == 16
    assert list(turns.points) == [short, others, long]
    assert turns.ask(PROMPT, 1)[1] == 8
    assert list(turns.points) == [others, long, short]


@EACH_KIND
def test_a_branch_of_instructions_that_many_share_stays_when_what_follows_goes_first(kinds):
    turns = Turns(kinds)
    for token in (30, 40):  # the second one proves that they are shared
        turns.ask([*PROMPT[:8], *[token] * 6], 6, seed=60 + token)
    assert turns.found == [(8, "last"), (12, "first"), (12, "first"), (16, "last"), (16, "last")]


def test_chats_go_on_from_their_answers_where_there_are_too_few_states_for_the_ends_of_their_prompts():
    turns = Turns(("state",), state_pages=6)
    chats = [turns.ask([first, *PROMPT], 8, seed=20 + 10 * first)[0] for first in range(4)]
    for number, told in enumerate(chats):
        assert turns.ask([*told, 90], 1)[1] == 16, f"chat {number} begins anew"


@pytest.mark.parametrize(
    ("kinds", "steps"), [(("state",), [2, 1, 3]), (("state", "amid"), [1, 1, 2]), (("window", "state", "amid"), [1, 1, 2])]
)
def test_where_states_are_kept_amid_items_a_prompt_is_one_step_and_one_that_branches_two(kinds, steps):
    """The second prompt is the first again, the third has two more places where states are kept: its branch and its own end."""
    turns, found = Turns(kinds), []
    for prompt, num_cached in ((PROMPT, 0), (PROMPT, 8), ([*PROMPT[:4], *[40] * 6], 0)):
        assert turns.ask(prompt, 1)[1] == num_cached
        found.append(turns.num_prompt_steps)
    assert found == steps
    assert turns.found == [(4, "last"), (8, "last"), (8, "last")]


def test_a_chunk_that_a_budget_ends_keeps_the_state_amid_it_and_at_its_end():
    turns = Turns(("state", "amid"), max_batch_tokens=13)
    turns.ask([*[3] * 4, *[4] * 5], 1)
    turns.ask([*[3] * 4, *[5] * 18], 1)
    assert turns.num_prompt_steps == 2
    assert turns.found == [(4, "last"), (8, "last"), (12, "first"), (20, "last")]


def test_where_no_page_is_free_a_state_goes_on_and_none_is_kept_amid_an_item():
    turns = Turns(("state", "amid"), state_pages=1)
    assert turns.ask(PROMPT, 1)[1] == 0
    assert turns.num_prompt_steps == 1
    assert turns.found == []


@pytest.mark.parametrize("kinds", [("state",), ("state", "amid")])
def test_behind_a_prompt_of_whole_pages_both_its_last_pages_ends_are_kept(kinds):
    turns = Turns(kinds)
    told, _ = turns.ask(PROMPT[:8], 1)
    assert turns.found == [(4, "first"), (8, "last")]
    assert turns.ask([*told, 40], 1)[1] == 8


def test_who_is_aborted_amid_two_steps_leaves_a_point_where_its_last_written_page_ended():
    """The second step begins a page: its window is not given up before the first one's token is known."""
    turns = Turns(("window",))
    scheduler, steps = turns.scheduler, []
    scheduler.submit(asked_of("r", PROMPT, max_tokens=20, ignore_eos=True))
    request = scheduler.table.by_id["r"]
    while request.num_computed < 17:
        steps.append(scheduler.next_step())
        steps[-1] = steps[-1], turns.device.launch(steps[-1], lambda: 20)
        if request.num_computed < 16:
            scheduler.complete(*steps.pop())
    scheduler.abort("r")
    for step in steps:
        scheduler.complete(*step)
    scheduler.check_idle()
    assert turns.found == [(8, "first"), (12, "last")]


def test_two_that_go_on_from_one_point_write_to_a_page_each_though_it_is_given_up_before_they_begin():
    """I4: the page has two owners, and no point any more."""
    turns = Turns(("state",))
    turns.ask(PROMPT, 1)
    manager, (point,) = turns.scheduler._kv, turns.points
    both = [SequenceKV(token_ids=array("i", [*PROMPT, token]), salt="") for token in (40, 41)]
    assert all(manager.enter(kv, reuse=True, reserved=NOTHING) for kv in both)
    turns.points.drop(point)
    for kv in both:
        manager.prepare(kv, 8, 11, num_known=11)
    (read,) = point.pages[STATE]
    assert {kv.states.read for kv in both} == {read}
    assert len({read, *(kv.states.current for kv in both)}) == 3


def test_a_prompt_has_the_windows_of_points_for_one_step():
    turns = Turns(("window",), window_pages=5)
    turns.ask(PROMPT, 8)
    assert turns.scheduler.pages["window"].free < 4, "a prompt of 4 pages needs those of points"
    turns.ask(range(40, 56), 1)
    assert turns.num_prompt_steps == 1


def test_an_end_of_a_chunk_that_a_branch_begins_behind_still_goes_first():
    turns = Turns(("state",), max_batch_tokens=8)
    turns.ask([*[3] * 12, *[4] * 6], 1)
    assert turns.ask([*[3] * 12, *[5] * 6], 1)[1] == 8
    assert turns.found == [(8, "first"), (12, "last"), (16, "last"), (16, "last")]


@EACH_KIND
def test_where_an_answer_ends_no_page_the_turn_before_stays_as_it_was(kinds):
    turns = Turns(kinds)
    told, _ = turns.ask(PROMPT, 8)
    turns.ask([*told, 40, 41, 42, 43], 1)
    assert turns.found == [(8, "first"), (16, "last"), (20, "last")]


@pytest.mark.parametrize("kind", ["window", "state"])
def test_a_page_that_nobody_gave_back_is_noticed_when_nothing_runs(kind):
    """Taken and forgotten, or used besides by one who is gone."""
    turns = Turns((kind,))
    turns.ask(PROMPT, 8)
    turns.scheduler.check_idle()
    allocator, (page, *_) = turns.points.allocators[kind], next(iter(turns.points)).pages[kind]
    allocator.hold([page])
    with pytest.raises(AssertionError, match=f"nothing runs, but 1 cached {kind} pages are in use"):
        turns.scheduler.check_idle()
    allocator.give_back([page])
    allocator.take(1)
    with pytest.raises(AssertionError, match=f"nothing runs, but .* free .* cached {kind} pages are not all"):
        turns.scheduler.check_idle()
