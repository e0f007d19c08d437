"""Random submissions, aborts, failures and steps on tiny pools; after every action everything must still be right."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from enginery.contracts.request import FinishReason
from enginery.errors import QueueFull, RequestError
from enginery.schedule.request import RequestStatus

from .device import EOS, FCFS, PRIORITY, FakeDevice, asked_of, scheduler_of

STOP = 1


class SchedulerMachine(RuleBasedStateMachine):
    """depth: how many steps may be in flight; 1 is the plain loop."""

    depth = 1

    @initialize(data=st.data())
    def build(self, data):
        draw = data.draw
        self.page_size = draw(st.sampled_from([1, 4, 16]))
        self.num_pages = draw(st.integers(1, 60)) // self.page_size + 1
        self.limits = {
            "page_size": self.page_size,
            "num_pages": self.num_pages,
            "max_model_len": draw(st.integers(2, 48)),
            "max_batch_tokens": draw(st.integers(1, 24)),
            "max_batch_requests": draw(st.integers(1, 6)),
            "max_queued_requests": 8,
            "prefix_cache": draw(st.booleans()),
        }
        self.scheduler = scheduler_of(draw(st.sampled_from([FCFS, PRIORITY])), **self.limits)
        self.roster = self.scheduler._roster
        self.device = FakeDevice(self.page_size)
        self.launched = []
        self.results = {}
        self.requests = {}
        self.dropped = set()
        self.num_submitted = 0

    @rule(data=st.data())
    def submit(self, data):
        draw = data.draw
        kinds = draw(st.lists(st.integers(3, 5), max_size=4))
        prompt = [kind for kind in kinds for _ in range(draw(st.sampled_from([1, 4, 8])))] + draw(st.lists(st.just(9), max_size=2))
        max_tokens = draw(st.integers(1, 24))
        asked = asked_of(
            f"r{self.num_submitted}",
            prompt,
            salt=draw(st.sampled_from(["", "", "s"])),
            priority=draw(st.integers(0, 2)),
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, max_tokens)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from([(), (STOP,)])),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        )
        num_slots = self.num_pages * self.page_size
        try:
            self.scheduler.submit(asked)
        except QueueFull:
            assert self.scheduler.num_waiting >= 8
        except RequestError:
            assert not prompt or len(prompt) >= self.limits["max_model_len"] or len(prompt) > num_slots
        else:
            assert prompt
            self.num_submitted += 1
            self.requests[asked.request_id] = self.roster.by_id[asked.request_id]
            self.results[asked.request_id] = []

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        had_ended = self.requests[request_id].status is RequestStatus.FINISHED
        assert self.scheduler.abort(request_id) is not had_ended
        if not had_ended:
            self.dropped.add(request_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fail_one(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.dropped.update(request.request_id for request in self.scheduler.fail([request_id]))

    @precondition(lambda self: len(self.launched) < self.depth)
    @rule(choices=st.randoms(use_true_random=False))
    def schedule(self, choices):
        self.launch(choices)

    @precondition(lambda self: self.launched)
    @rule()
    def complete(self):
        launched = self.launched.pop(0)
        alive = [item.request.status is not RequestStatus.FINISHED for item in launched.step.items]
        results = self.scheduler.complete(launched.step, launched.sampled)
        assert [result.item for result in results] == [index for index, lives in enumerate(alive) if lives]
        for result in results:
            assert result.token_id == launched.sampled[result.item]
            if result.token_id is not None:
                self.results[result.request.request_id].append(result)

    @precondition(lambda self: self.launched)
    @rule()
    def fail_step(self):
        launched = self.launched.pop(0)
        failed = self.scheduler.fail(launched.step)
        self.dropped.update(request.request_id for request in failed)
        self.device.spoil(launched)
        for later in self.launched:  # what was computed from spoilt keys and values is spoilt
            for item, slots in zip(later.step.items, later.writes, strict=True):
                if item.request in {item.request for item in launched.step.items}:
                    self.device.kv.update(dict.fromkeys(slots, "spoilt"))

    def launch(self, choices):
        running = list(self.roster.running)
        step = self.scheduler.next_step()
        self.check_step(step, running)
        if step.items:
            self.launched.append(self.device.launch(step, lambda: choices.choice([0, 0, 0, 0, STOP, EOS])))

    def check_step(self, step, running):
        items = step.items
        assert step.num_tokens == sum(item.num_tokens for item in items) <= self.limits["max_batch_tokens"]
        assert len(items) == len({item.request for item in items}) <= self.limits["max_batch_requests"]
        assert all(item.num_tokens == 1 and item.samples for item in items[: step.num_decode])
        assert all(item.num_tokens >= 1 for item in items)
        for item in items:
            wanted = item.request.asked.params.prompt_logprobs is not None and item.start < item.request.num_prompt_tokens
            recomputes = item.request.num_output_tokens > 0
            assert item.num_logits == (item.num_tokens if wanted and not recomputes else item.samples)
        kept = [request.order for request in running if request.request_id not in step.preempted]
        gone = [self.requests[request_id].order for request_id in step.preempted]
        assert not gone or max(kept) < min(gone), "somebody was preempted for a later request"
        admitted = [item.request.order for item in items if item.request not in running]
        waiting = [request.order for request in self.roster.waiting._requests]
        assert not (admitted and waiting) or max(admitted) < min(waiting), "somebody passed the head of the queue"

    @invariant()
    def everything_is_sound(self):
        self.scheduler.check_integrity()
        allocator = self.roster.residency.allocator
        for launched in self.launched:
            for item, slots in zip(launched.step.items, launched.writes, strict=True):
                for page in {slot // self.page_size for slot in slots}:
                    assert allocator.is_taken(page), "a page was freed while a step in flight writes to it"
                    assert page in item.request.pages
        for request_id, results in self.results.items():
            request = self.requests[request_id]
            output = [result.token_id for result in results]
            assert list(request.token_ids) == [*request.asked.prompt_token_ids, *output], "a token was lost or came twice"
            assert all(result.finish_reason is None for result in results[:-1])
            if request_id not in self.dropped:
                finish = results[-1].finish_reason if results else None
                assert finish == self.expected_finish(request, output)
                assert (finish is not None) == (request.status is RequestStatus.FINISHED)

    def expected_finish(self, request, output):
        params, num_prompt = request.asked.params, request.num_prompt_tokens
        room = min(self.limits["max_model_len"], self.num_pages * self.page_size + 1) - num_prompt
        ends = {*params.stop_token_ids, *([] if params.ignore_eos else [EOS])}
        if output and len(output) >= params.min_tokens and output[-1] in ends:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(output) == min(params.max_tokens, room) else None

    def teardown(self):
        """Everything still there finishes in a bounded number of steps: the first in order never waits for anybody."""
        choices = random.Random(0)
        most = sum(2 * request.limit + 2 for request in self.requests.values()) * self.depth
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            while len(self.launched) < self.depth:
                count = len(self.launched)
                self.launch(choices)
                if len(self.launched) == count:
                    break
            assert self.launched, "there is work, but nothing is scheduled and nothing is in flight"
            self.complete()
            self.everything_is_sound()
        assert not self.scheduler.has_work, f"not done after {most} steps"
        self.scheduler.check_idle()
        assert self.scheduler.free_pages + self.scheduler.cached_pages == self.num_pages


class OverlappedMachine(SchedulerMachine):
    """Step n + 1 is scheduled while step n is in flight."""

    depth = 2


class DeepMachine(SchedulerMachine):
    """Three steps in flight: not planned, but nothing forbids it."""

    depth = 3


often = settings(max_examples=120, stateful_step_count=40, deadline=None)
SchedulerMachine.TestCase.settings = OverlappedMachine.TestCase.settings = often
DeepMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_the_plain_loop_keeps_every_promise = SchedulerMachine.TestCase
test_the_overlapped_loop_keeps_every_promise = OverlappedMachine.TestCase
test_three_steps_in_flight_keep_every_promise = DeepMachine.TestCase
