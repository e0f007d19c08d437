"""Lanes of one scheduler: where a request goes, that all lanes agree on each step, and that none loses a page."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import check_scheduler
from pairwise import examples

from enginery.contracts.batch import Phase
from enginery.contracts.step import StepInput, pack, unpack
from enginery.errors import QueueFull, RequestError
from enginery.kv.pages import PageAllocator
from enginery.kv.prefix import NoPrefixCache, RadixPrefixCache
from enginery.schedule import planner
from enginery.schedule.lanes import LaneScheduler
from enginery.schedule.request import RequestStatus
from enginery.schedule.scheduler import Scheduler
from enginery.worker.ranks.lanes import rows_of_all

from .device import EOS, FCFS, FakeDevice, ItemOf, Scheduled, asked_of, output_of, settings_of

STOP = 1
SEEN = Counter()


def lane_of(place, **changes):
    settings = settings_of(first_seat=place * changes.get("max_batch_requests", 16), **changes)
    allocator = PageAllocator(settings.num_pages)
    cache = RadixPrefixCache(settings.page_size, allocator) if settings.prefix_cache else NoPrefixCache()
    return Scheduler(settings, FCFS, cache=cache, allocator=allocator, eos_token_ids=frozenset({EOS}), clock=lambda: 0.0)


def lanes_of(count, **changes):
    """The scheduler, and the lanes that it is made of."""
    lanes = [lane_of(place, **changes) for place in range(count)]
    return LaneScheduler(lanes), lanes


def names(lane):
    return sorted(lane.table.by_id)


def run(scheduler, token=5):
    """One step in which every item that samples gets this token."""
    step = scheduler.next_step()
    sampled = [token if item.samples else None for item in step.each()]
    return step, scheduler.complete(step, output_of(step, sampled))


def test_a_request_goes_where_the_least_work_is_left():
    scheduler, lanes = lanes_of(2)
    for name, length in (("long", 40), ("short", 4), ("other", 8), ("last", 20)):
        scheduler.submit(asked_of(name, [ord(name[0])] * length))
    assert [names(lane) for lane in lanes] == [["long"], ["last", "other", "short"]]  # 40 and 4, then 12, then 32
    for _ in range(2):
        run(scheduler)
    scheduler.submit(asked_of("next", [9] * 8))  # one decodes here, three there
    assert [names(lane) for lane in lanes] == [["long", "next"], ["last", "other", "short"]]


def test_a_request_goes_where_its_prefix_is_unless_that_costs_more():
    scheduler, lanes = lanes_of(2)
    scheduler.submit(asked_of("a", [3] * 17, max_tokens=1))
    scheduler.submit(asked_of("b", [4] * 9, max_tokens=1))
    run(scheduler)
    scheduler.submit(asked_of("like b", [4] * 9))
    scheduler.submit(asked_of("like a", [3] * 17))
    assert [names(lane) for lane in lanes] == [["like a"], ["like b"]]
    run(scheduler)
    scheduler.submit(asked_of("more of a", [3] * 17))  # 1 and what is not cached, where the other has 1 and all of it
    scheduler.submit(asked_of("salted", [3] * 17, salt="s"))  # nobody has its prefix
    assert [names(lane) for lane in lanes] == [["like a", "more of a"], ["like b", "salted"]]
    for name in "pqr":
        scheduler.submit(asked_of(name, [ord(name)] * 30))
    assert [names(lane) for lane in lanes] == [["like a", "more of a", "p", "r"], ["like b", "q", "salted"]]
    scheduler.submit(asked_of("again", [3] * 17))  # so much is left there that it is computed anew
    assert names(lanes[1]) == ["again", "like b", "q", "salted"]


def test_a_prompt_that_is_computed_whole_does_not_go_where_its_prefix_is():
    """It is if log-probabilities of its tokens are asked for."""
    scheduler, lanes = lanes_of(2)
    scheduler.submit(asked_of("a", [3] * 17, max_tokens=1))
    run(scheduler)
    scheduler.submit(asked_of("scored", [3] * 17, prompt_logprobs=1))  # nothing is left in either
    scheduler.submit(asked_of("like a", [3] * 17))
    assert [names(lane) for lane in lanes] == [["like a"], ["scored"]]


def test_what_waits_in_all_lanes_is_bounded_together():
    scheduler, _ = lanes_of(2, max_queued_requests=3)
    for name in "abc":
        scheduler.submit(asked_of(name, [3, 4]))
    with pytest.raises(QueueFull, match=r"3 requests are waiting, the most that --max-queued-requests allows \(3\)"):
        scheduler.submit(asked_of("d", [3, 4]))


def test_a_name_is_used_once_in_all_lanes():
    scheduler, lanes = lanes_of(2)
    scheduler.submit(asked_of("a", [3, 4]))
    with pytest.raises(RequestError, match="the request id 'a' is in use"):
        scheduler.submit(asked_of("a", [3, 4]))
    assert [names(lane) for lane in lanes] == [["a"], []]
    assert (scheduler.abort("b"), scheduler.abort("a"), scheduler.abort("a")) == (False, True, False)


def test_a_request_that_is_refused_counts_as_sent_nowhere():
    scheduler, lanes = lanes_of(2)
    with pytest.raises(RequestError, match="empty"):
        scheduler.submit(asked_of("none", []))
    scheduler.submit(asked_of("first", [5]))
    assert [names(lane) for lane in lanes] == [["first"], []]


def test_what_a_grammar_refuses_ends_the_request_of_that_item():
    scheduler, _ = lanes_of(2)
    for name in "ab":
        scheduler.submit(asked_of(name, [5]))
    step = scheduler.next_step()
    outputs = scheduler.complete(step, output_of(step, [5, 5]), {1: "no token fits"})
    assert [(output.request_id, output.error) for output in outputs] == [("a", None), ("b", "no token fits")]


def test_who_has_to_wait_again_is_named_of_every_lane():
    scheduler, lanes = lanes_of(2, num_pages=20)
    for name in "ab":
        lanes[1].submit(asked_of(name, [ord(name)] * 4, max_tokens=60))
    preempted = []
    while scheduler.has_work:
        run(scheduler)
        preempted += scheduler.preempted
    assert preempted == ["b"]


def test_a_held_request_counts_where_it_is_and_runs_when_it_is_released():
    scheduler, lanes = lanes_of(2)
    for place in range(2):
        scheduler.submit(asked_of(f"held {place}", [3 + place] * 9), held=True)
    scheduler.submit(asked_of("plain", [5] * 5))
    assert [names(lane) for lane in lanes] == [["held 0", "plain"], ["held 1"]]
    assert [own.num_items for own in scheduler.next_step().lanes] == [1, 0]
    scheduler.release("held 1", None)
    assert [own.num_items for own in scheduler.next_step().lanes] == [1, 1]
    scheduler.release("held 0", None)
    assert [own.num_items for own in scheduler.next_step().lanes] == [2, 1]


def test_a_lane_without_work_runs_padded_like_the_others():
    scheduler, _ = lanes_of(3)
    scheduler.submit(asked_of("a", [3] * 7))
    step, _ = run(scheduler)
    assert [own.phase for own in step.lanes] == [Phase.PREFILL, Phase.IDLE, Phase.IDLE]
    assert {(own.number, own.run, own.padded) for own in step.lanes} == {(0, step.run, (1, 7))}
    assert (step.phase, step.num_items, step.num_tokens) == (Phase.PREFILL, 1, 7)


def test_a_step_without_work_in_any_lane_is_empty_and_has_no_number():
    scheduler, _ = lanes_of(2)
    assert not scheduler.next_step().items
    scheduler.submit(asked_of("a", [3]))
    assert scheduler.next_step().number == 0


@pytest.mark.parametrize("place", [0, 1])
def test_a_page_that_any_lane_lost_is_found_when_nothing_runs(place):
    scheduler, lanes = lanes_of(2)
    scheduler.check_idle()
    lanes[place].table.kv.allocator.take(1)
    with pytest.raises(AssertionError, match=r"63 free \+ 0 cached pages are not all 64"):
        scheduler.check_idle()


def test_greedy_is_what_all_lanes_are():
    scheduler, _ = lanes_of(2)
    scheduler.submit(asked_of("greedy", [3] * 3, temperature=0.0))
    assert scheduler.next_step().run.tokens_only
    scheduler.submit(asked_of("drawn", [4] * 3, temperature=1.0))
    step = scheduler.next_step()
    assert [own.num_items for own in step.lanes] == [1, 1]
    assert not any(own.run.tokens_only or own.run.greedy for own in step.lanes)


class RandomLanes:
    """Lanes, each with a device that knows whose keys and values its slots hold. depth: steps in flight at the most."""

    def __init__(self, seed, depth):
        self.random, self.depth = random.Random(seed), depth
        pick = self.random.choice
        self.page_size = pick([1, 4])
        self.limits = {
            "page_size": self.page_size,
            "num_pages": self.random.randint(12, 40) // self.page_size,
            "max_model_len": pick([12, 40]),
            "max_batch_tokens": pick([self.random.randint(1, 8), 16]),
            "max_batch_requests": self.random.randint(2, 4),
            "prefill_fraction": pick([0.05, 1.0]),
            "max_queued_requests": 8,
            "prefix_cache": pick([True, True, False]),
        }
        self.scheduler, self.lanes = lanes_of(pick([2, 3]), **self.limits)
        self.devices = [FakeDevice(self.page_size) for _ in self.lanes]
        self.launched, self.requests, self.told, self.count = [], {}, {}, 0

    def act(self):
        chance = self.random.random()
        if chance < 0.03 and self.requests:
            self.scheduler.abort(self.random.choice(list(self.requests)))
        elif chance < 0.05 and self.launched:
            self.fail()
        elif chance < 0.35:
            self.submit()
        elif len(self.launched) < self.depth and chance < 0.8:
            self.launch()
        elif self.launched:
            self.complete()
        for lane in self.lanes:
            check_scheduler(lane)

    def submit(self):
        name, pick = f"r{self.count}", self.random.choice
        prompt = [pick([3, 4])] * pick([1, 4, 9]) + [9] * pick([0, 1, 2])
        try:
            self.scheduler.submit(asked_of(name, prompt, max_tokens=pick([1, 20, 40]), prompt_logprobs=pick([None, None, 1])))
        except QueueFull:
            assert self.scheduler.num_waiting >= 8
        except RequestError:
            assert len(prompt) >= self.limits["max_model_len"] or len(prompt) > self.limits["num_pages"] * self.page_size
        else:
            (lane,) = [lane for lane in self.lanes if name in lane.table.by_id]
            self.requests[name], self.told[name] = lane.table.by_id[name], []
            self.count += 1

    def launch(self):
        step = self.scheduler.next_step()
        if not step.items:
            return
        self.check_step(step)
        sampled = [None] * step.num_items
        writes = []
        for own, places, device in zip(step.lanes, step.lane_places, self.devices, strict=True):
            items = tuple(
                ItemOf(self.scheduler.requests[place], *_of(item)) for place, item in zip(places.tolist(), own.each(), strict=True)
            )
            done = device.launch(Scheduled(own, items, ()), lambda: self.random.choice([0] * 30 + [STOP, EOS]))
            writes.append(done)
            for place, token in zip(places.tolist(), done.sampled, strict=True):
                sampled[place] = token
        self.launched.append((step, list(self.scheduler.requests), sampled, writes))
        SEEN["preempted"] += len(self.scheduler.preempted)

    def check_step(self, step: StepInput):
        limits, requests = self.limits, self.scheduler.requests
        assert len({(own.number, own.run, own.padded) for own in step.lanes}) == 1, "all lanes agree"
        assert {(own.number, own.run, own.padded) for own in step.lanes} == {(step.number, step.run, step.padded)}
        assert step.padded == (max(own.num_items for own in step.lanes), max(own.num_tokens for own in step.lanes))
        assert [request.kv.seat for request in requests] == step.columns().seat.tolist()
        assert sorted(np.concatenate(step.lane_places).tolist()) == list(range(step.num_items))
        every, rows = step.each(), []
        most = max(1, *(sum(item.num_logits for item in own.each()) for own in step.lanes))
        for lane, (own, places) in enumerate(zip(step.lanes, step.lane_places, strict=True)):
            seats = range(lane * limits["max_batch_requests"], (lane + 1) * limits["max_batch_requests"])
            assert all(item.seat in seats for item in own.each())
            assert [every[place] for place in places.tolist()] == own.each()
            assert own.num_tokens <= limits["max_batch_tokens"]
            assert (own.phase is Phase.IDLE) == (not own.items)
            first = lane * most
            for item, place in zip(own.each(), places.tolist(), strict=True):
                rows.append((place, list(range(first, first + item.num_logits))))
                first += item.num_logits
        assert rows_of_all(step).tolist() == [row for _, found in sorted(rows) for row in found]
        is_prompt = [item.num_tokens > 1 or place >= step.num_decode for place, item in enumerate(every)]
        assert is_prompt == sorted(is_prompt), "those that decode come first"
        again = unpack(pack(step))
        assert (again.items, again.phase, again.run, again.padded) == (step.items, step.phase, step.run, step.padded)
        assert [pack(own) for own in again.lanes] == [pack(own) for own in step.lanes]
        SEEN["idle"] += any(own.phase is Phase.IDLE for own in step.lanes)
        SEEN["phases"] += len({own.phase for own in step.lanes} - {Phase.IDLE}) > 1

    def complete(self):
        step, requests, sampled, _ = self.launched.pop(0)
        alive = {request.request_id for request in requests if request.status is not RequestStatus.FINISHED}
        for output in self.scheduler.complete(step, output_of(step, sampled)):
            assert output.request_id in alive
            self.told[output.request_id] += output.token_ids
        for name, told in self.told.items():
            request = self.requests[name]
            assert list(request.token_ids) == [*request.asked.prompt_token_ids, *told], "a token was lost, or is another's"

    def fail(self):
        step, requests, _, writes = self.launched.pop(0)
        self.scheduler.fail(step)
        members = set(requests)
        for device, done in zip(self.devices, writes, strict=True):
            device.spoil(done)
        for _, _, _, later in self.launched:  # what was computed from spoilt keys and values is spoilt
            for device, done in zip(self.devices, later, strict=True):
                for item, slots in zip(done.step.items, done.writes, strict=True):
                    if item.request in members:
                        device.kv.update(dict.fromkeys(slots, "spoilt"))

    def finish(self):
        for _ in range(self.depth * sum(2 * request.limit + 2 for request in self.requests.values())):
            while len(self.launched) < self.depth:
                before = len(self.launched)
                self.launch()
                if len(self.launched) == before:
                    break
            if not self.scheduler.has_work:
                break
            self.complete()
        assert not self.scheduler.has_work
        self.scheduler.check_idle()
        for counts in self.scheduler.lanes:
            assert (counts.num_running, counts.num_waiting) == (0, 0)
            pages = counts.pages["full"]
            assert pages.free + pages.cached == pages.total == self.limits["num_pages"]
        assert self.scheduler.pages["full"].total == len(self.lanes) * self.limits["num_pages"]


def _of(item):
    return item.start, item.num_tokens, item.num_logits, bool(item.samples), bool(item.pending)


@pytest.mark.parametrize("depth", [1, 2])
def test_random_use_of_lanes_breaks_no_promise(depth, monkeypatch):
    SEEN.clear()
    monkeypatch.setattr(planner, "HEADROOM_TOKENS", 0)
    monkeypatch.setattr(planner, "MIN_PREFILL_TOKENS", 2)
    monkeypatch.setattr(planner, "MIXED_ROWS", 2)

    @settings(max_examples=examples(30), deadline=None)
    @given(seed=st.integers(0, 2**32))
    def run(seed):
        use = RandomLanes(seed, depth)
        for _ in range(80):
            use.act()
        use.finish()

    run()
    assert all(SEEN[what] for what in ("idle", "phases", "preempted")), SEEN
