"""Sequences over windows and states: what each reads is its own, what can be resumed from is what it says, nothing is lost."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import check_scheduler
from pairwise import EVERYTHING, examples

from enginery.contracts.batch import FULL, STATE, WINDOW
from enginery.errors import QueueFull, RequestError
from enginery.kv.kinds import most_window_pages, reach_of
from enginery.schedule import planner

from .device import EOS, asked_of, settings_of, shape
from .kinds_device import KindsDevice, RandomGuesses, scheduler_of_kinds

SEEN = Counter()
STOP = 1


class RandomKinds:
    """Random use of one scheduler over random kinds. depth: steps in flight. stages: of a pipeline, then as many. most_guesses: of
    a request in a step."""

    def __init__(self, seed, depth, stages=1, most_guesses=0):
        self.random, self.depth = random.Random(seed), depth
        pick = self.random.choice
        self.page_size = pick([1, 2, 4])
        self.settings = settings_of(
            page_size=self.page_size,
            num_pages=self.random.randint(8, 60),
            max_model_len=pick([20, 60]),
            max_batch_tokens=pick([3, 8, 32]),
            max_batch_requests=self.random.randint(1, 6),
            prefill_fraction=pick([0.1, 1.0]),
            prefix_cache=pick([True, True, True, False]),
            stages=stages,
        )
        self.window = pick([None, 1, 3, 7, 12])
        has_states = self.window is None or pick([True, False])
        least = self.largest(max(self.settings.max_model_len, self.settings.num_pages * self.page_size))
        self.state_pages = self.random.randint(2, 14) if has_states else None
        self.scheduler = scheduler_of_kinds(
            self.settings,
            window=self.window,
            window_pages=least + self.random.randint(0, 20),
            state_pages=self.state_pages,
            within_items=pick([True, False]),
            drafting=RandomGuesses(self.random, most_guesses) if most_guesses else None,
        )
        self.device = KindsDevice(self.scheduler, self.settings, window=self.window)
        self.launched, self.requests, self.count = [], {}, 0
        self.chaos = pick([0, 0.03, 0.15])
        self.sampled = pick([[0], [0] * 20 + [STOP, EOS]])

    def largest(self, tokens):
        if self.window is None:
            return 0
        reach = reach_of(self.window, self.page_size)
        return most_window_pages(tokens, self.settings.max_batch_tokens, reach=reach, page_size=self.page_size)

    def act(self):
        if self.requests and self.random.random() < self.chaos:
            self.random.choice([self.abort, self.fail_step])()
        elif self.random.random() < 0.25:
            self.submit()
        elif self.random.random() < self.chaos / 3:
            self.evict()
        elif self.may_launch() and self.random.random() < 0.7:
            self.launch()
        elif self.launched:
            self.complete()
        self.check()

    def may_launch(self):
        """How many tokens a step tells that verifies guesses is not known before."""
        return len(self.launched) < self.depth and not any(step.value.verifies for step, _ in self.launched)

    def submit(self):
        pick = self.random.choice
        prompt = [pick([3, 4]) for _ in range(pick([1, 2, 3])) for _ in range(pick([1, 4, 9]))] + [9] * pick([0, 1, 2])
        self.count += 1
        asked = asked_of(
            f"r{self.count}",
            prompt,
            salt=pick(["", "", "s"]),
            max_tokens=pick([1, 5, 30]),
            prompt_logprobs=pick([None, None, None, 1]),
        )
        try:
            self.scheduler.submit(asked)
        except (QueueFull, RequestError):
            return
        self.requests[asked.request_id] = self.scheduler.table.by_id[asked.request_id]

    def abort(self):
        self.scheduler.abort(self.random.choice(list(self.requests)))

    def evict(self):
        """All that the prefix cache may give up."""
        cache = self.scheduler._kv.cache
        for point in list(cache.points or ()):
            cache.points.drop(point)
            SEEN["evicted with all steps in flight"] += len(self.launched) == self.depth
        cache.evict(cache.num_evictable)

    def fail_step(self):
        """What it wrote, and what was computed from that, is spoilt."""
        if not self.launched:
            return
        failed, self.launched = self.launched, []
        for step, _ in failed:
            self.scheduler.fail(step)
            self.device.spoil(step)
            SEEN["failed"] += len(step.items)

    def launch(self):
        step = self.scheduler.next_step()
        SEEN["preempted"] += len(step.preempted)
        assert not {*step.preempted} & {item.request.request_id for item in step.items}, "who is preempted is in the step"
        SEEN["preempted with all other steps in flight"] += len(step.preempted) * (len(self.launched) == self.depth - 1)
        assert self.settings.stages == 1 or not any(item.input_pending for item in step.items), "a stage reads what is not known"
        for item in step.items:
            assert not step.value.verifies or item.start + item.num_tokens <= item.request.limit, "a guess behind a request's limit"
            SEEN["resumed"] += 0 < item.start == item.request.num_cached_tokens and not item.request.num_preemptions
        if step.items:
            sampled = self.device.launch(
                step,
                lambda: self.random.choice(self.sampled),
                lambda count: self.random.choice([count, self.random.randint(0, count)]),
            )
            self.launched.append((step, sampled))

    def complete(self):
        step, sampled = self.launched.pop(0)
        self.scheduler.complete(step, sampled)

    def check(self):
        check_scheduler(self.scheduler)
        if not self.launched:
            self.device.check_points()
            for request in self.scheduler.table.running:
                written = request.kv.num_written
                assert all(point.position <= written for point in request.kv.points), "what wrong guesses led to is kept"
        assert self.device.held["window"] <= self.largest(10**6)
        self.check_held()

    def check_held(self):
        """What is told of pages in use is what requests have, each page once."""
        finite, table = self.scheduler._kv.finite, self.scheduler.table
        resident = [request.kv for request in {*table.running, *table.leaving}]
        held = {FULL: {page for kv in resident for page in kv.pages}}
        held[WINDOW] = {page for kv in resident for page in kv.window.pages}
        held[STATE] = {*finite.read, *(page for kv in resident for page in kv.states.owned())}
        for kind, counts in self.scheduler.pages.items():
            assert counts.held == len(held[kind]), f"{counts.held} {kind} pages in use are told, {len(held[kind])} are"

    def finish(self):
        for _ in range(4000):
            while self.may_launch():
                before = len(self.launched)
                self.launch()
                if len(self.launched) == before:
                    break
            if not self.scheduler.has_work:
                break
            assert self.launched, "there is work, but nothing is scheduled and nothing is in flight"
            self.complete()
            self.check()
        assert not self.scheduler.has_work
        self.scheduler.check_idle()
        for counts in self.scheduler.pages.values():
            assert counts.free + counts.cached == counts.total
        cache = self.scheduler._kv.cache
        cache.evict(cache.num_evictable)
        for counts in self.scheduler.pages.values():
            assert counts.free == counts.total, "a page is lost"
        SEEN.update(self.device.seen)


@pytest.mark.parametrize(
    ("depth", "stages", "most_guesses"), [(1, 1, 0), (2, 1, 0), (2, 2, 0), (1, 1, 5), (2, 1, 5)] + [(4, 4, 0)] * EVERYTHING
)
def test_whoever_comes_and_goes_reads_its_own_and_nothing_is_lost(depth, stages, most_guesses, monkeypatch):
    SEEN.clear()

    @settings(max_examples=examples(80), deadline=None)
    @given(seed=st.integers(0, 2**32), headroom=st.sampled_from([0, 4]))
    def run(seed, headroom):
        monkeypatch.setattr(planner, "HEADROOM_TOKENS", headroom)
        monkeypatch.setattr(planner, "MIN_PREFILL_TOKENS", 2)
        monkeypatch.setattr(planner, "MIXED_ROWS", 2)
        use = RandomKinds(seed, depth, stages, most_guesses)
        for _ in range(120):
            use.act()
        use.finish()

    seldom = ["preempted", "resumed", "points", "a state moved", "failed", "evicted with all steps in flight"]
    seldom += ["a state was kept amid an item", "a shared page was read and not written"]
    seldom += ["preempted with all other steps in flight"] if depth > 1 else []
    if most_guesses:
        seldom += ["right guesses", "wrong guesses", "an end amid right guesses", "a state was kept amid guesses"]
    for _ in range(4):  # chance may leave one of them out
        run()
        if all(SEEN[what] for what in seldom):
            return
    pytest.fail(f"not all of {seldom} came about: {SEEN}")


def test_who_finds_too_few_window_pages_for_its_prompt_waits_however_many_full_pages_there_are(monkeypatch):
    """Of two prompts of 4 pages each, and 6 of windows. Nobody is let in only to be preempted."""
    monkeypatch.setattr(planner, "HEADROOM_TOKENS", 0)
    limits = settings_of(max_batch_tokens=32)
    scheduler = scheduler_of_kinds(limits, window=8, window_pages=6)
    device, steps = KindsDevice(scheduler, limits, window=8), []
    for name in "ab":
        scheduler.submit(asked_of(name, range(16), max_tokens=3, salt=name))
    while scheduler.has_work:
        steps.append(scheduler.next_step())
        scheduler.complete(steps[-1], device.launch(steps[-1], lambda: 0))
    prompt, token = 16, 1
    assert [shape(step) for step in steps] == [[(name, count)] for name in "ab" for count in (prompt, token, token)]
    assert not any(step.preempted for step in steps)


def steps_of_two_prompts(limits, *, state_pages):
    """What each step computes of a prompt of 10 tokens and one of 4, which both end with their first token."""
    scheduler = scheduler_of_kinds(limits, state_pages=state_pages)
    device, steps = KindsDevice(scheduler, limits), []
    for name, count in (("a", 10), ("b", 4)):
        scheduler.submit(asked_of(name, range(3, 3 + count), max_tokens=1, salt=name))
    while scheduler.has_work:
        steps.append(scheduler.next_step())
        scheduler.complete(steps[-1], device.launch(steps[-1], lambda: 0))
    return [shape(step) for step in steps]


def test_a_prompt_that_has_its_state_keeps_no_other_one_from_a_page():
    shapes = steps_of_two_prompts(settings_of(max_batch_tokens=8), state_pages=3)
    assert shapes == [[("a", 8)], [("a", 2), ("b", 4)]]


def test_the_pages_for_what_is_left_of_a_prompt_are_nobody_elses(monkeypatch):
    """A state is kept where the first prompt's second page ends, so that one step computes no more of it."""
    monkeypatch.setattr(planner, "HEADROOM_TOKENS", 0)
    assert steps_of_two_prompts(settings_of(num_pages=3), state_pages=6) == [[("a", 8)], [("a", 2)], [("b", 4)]]


def test_who_goes_for_want_of_windows_is_not_in_the_step_already(monkeypatch):
    """The later request begins with pages of a prompt before, so that it stands in front where all find room."""
    monkeypatch.setattr(planner, "HEADROOM_TOKENS", 0)
    limits = settings_of(max_batch_tokens=8)
    scheduler = scheduler_of_kinds(limits, window=3, window_pages=4)
    device, preempted = KindsDevice(scheduler, limits, window=3), 0
    for asks in ([("before", [3] * 6, 1)], [("first", [5] * 6, 20), ("later", [3] * 5, 20)]):
        for name, prompt, count in asks:
            scheduler.submit(asked_of(name, prompt, max_tokens=count, ignore_eos=True))
        while scheduler.has_work:
            step = scheduler.next_step()
            preempted += len(step.preempted)
            assert not {*step.preempted} & {item.request.request_id for item in step.items}
            scheduler.complete(step, device.launch(step, lambda: 0))
            check_scheduler(scheduler)
    assert preempted > 0
