"""A device that computes nothing but remembers whose keys and values each slot holds, and refuses to read anybody else's."""

from dataclasses import dataclass
from typing import NamedTuple

from integrity import check_scheduler

from enginery.config.schema import ScheduleSettings
from enginery.contracts.request import FinishReason, GenerationRequest, SamplingParams
from enginery.contracts.schedule import SchedulePolicySpec
from enginery.contracts.step import StepInput, StepOutput, StepTimes
from enginery.kv.pages import PageAllocator
from enginery.kv.prefix import NoPrefixCache, RadixPrefixCache
from enginery.schedule.request import Request, RequestStatus
from enginery.schedule.scheduler import Scheduler

EOS = 2
FCFS = SchedulePolicySpec(name="fcfs", api=(2, 0), key=lambda facts: (), summary="")
PRIORITY = SchedulePolicySpec(name="priority", api=(2, 0), key=lambda facts: (facts.priority,), summary="")


def settings_of(**changes):
    small = {
        "page_size": 4,
        "num_pages": 64,
        "max_model_len": 128,
        "max_batch_tokens": 64,
        "max_batch_requests": 16,
        "prefill_fraction": 1.0,
        "max_queued_requests": 100,
        "prefix_cache": True,
        "vocab_size": 1 << 20,
    }
    return ScheduleSettings(**(small | changes))


def asked_of(request_id, prompt, *, salt="", priority=0, prompt_only=False, **params):
    params.setdefault("max_tokens", 8)
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**params),
        priority=priority,
        cache_salt=salt,
        prompt_only=prompt_only,
    )


class ItemOf(NamedTuple):
    """An item of a step beside its request."""

    request: Request
    start: int
    num_tokens: int
    num_logits: int
    samples: bool
    input_pending: bool


@dataclass(frozen=True, eq=False)
class Scheduled:
    """A step, the requests of its items, and ids of those that wait again."""

    value: StepInput
    items: tuple[ItemOf, ...]
    preempted: tuple[str, ...]

    @property
    def num_decode(self):
        return self.value.num_decode

    @property
    def num_tokens(self):
        return self.value.num_tokens

    @property
    def num_prefill_tokens(self):
        return sum(item.num_tokens for item in self.items[self.num_decode :])


class Result(NamedTuple):
    """What a completed step did to one request. token_id: None where it sampled nothing."""

    item: int
    request: Request
    token_id: int | None
    finish_reason: FinishReason | None
    stop_token_id: int | None


class WatchedScheduler(Scheduler):
    """Takes steps and gives results together with their requests."""

    def next_step(self, *sizes):
        step = super().next_step(*sizes)
        items = [
            ItemOf(request, item.start, item.num_tokens, item.num_logits, bool(item.samples), bool(item.pending))
            for request, item in zip(self.requests, step.each(), strict=True)
        ]
        assert [item.request.kv.seat for item in items] == step.columns().seat.tolist()
        return Scheduled(step, tuple(items), tuple(self.preempted))

    @property
    def free_pages(self):
        return self.pages["full"].free

    @property
    def cached_pages(self):
        return self.pages["full"].cached

    def complete(self, step, sampled):
        alive = [index for index, item in enumerate(step.items) if item.request.status is not RequestStatus.FINISHED]
        outputs = {output.request_id: output for output in super().complete(step.value, output_of(step.value, sampled))}
        results = []
        for index in alive:
            request = step.items[index].request
            output = outputs.pop(request.request_id, None)
            token = None if output is None else output.token_ids[0]
            reason, stop = (None, None) if output is None else (output.finish_reason, output.stop_token_id)
            results.append(Result(index, request, token, reason, stop))
        assert not outputs, "a result for a request that had ended"
        return results

    def fail(self, failed):
        return super().fail(failed.value if isinstance(failed, Scheduled) else failed)


class Told(list):
    """Of each item what it is told: a tuple of tokens, several where guesses were right."""


def output_of(step, sampled):
    """What a worker would say that has sampled these tokens; None where an item samples none. Or that has `Told` these."""
    return StepOutput(
        number=step.number,
        token_ids=sampled if isinstance(sampled, Told) else [() if token is None else (token,) for token in sampled],
        logprobs={},
        prompt_logprobs={},
        embeddings={},
        failed={},
        captured=False,
        times=StepTimes(0.0, 0.0, 0.0, 0.0),
    )


def scheduler_of(policy=FCFS, **changes):
    """A scheduler whose clock stands still: order of submission decides."""
    settings = settings_of(**changes)
    allocator = PageAllocator(settings.num_pages)
    cache = RadixPrefixCache(settings.page_size, allocator) if settings.prefix_cache else NoPrefixCache()
    return WatchedScheduler(settings, policy, cache=cache, allocator=allocator, eos_token_ids=frozenset({EOS}), clock=lambda: 0.0)


@dataclass
class Launched:
    """A step in flight. writes: per item, the slots that it writes."""

    step: object
    sampled: list
    writes: list


class FakeDevice:
    """Runs steps in the order they are launched in.

    kv maps each slot to a value that stands for salt, tokens up to here. tokens: per request, what it was fed and has sampled; it
    knows tokens of steps in flight, which the scheduler does not.
    """

    def __init__(self, page_size):
        self.page_size = page_size
        self.kv = {}
        self.tokens = {}

    def launch(self, step, choose):
        """Write the step's keys and values, check everything that each item reads, and sample with `choose()`."""
        writes = []
        for item in step.items:
            request, end = item.request, item.start + item.num_tokens
            tokens = self.tokens.setdefault(request, list(request.token_ids))
            assert len(request.kv.pages) * self.page_size >= end, "no page for a token to write"
            if item.input_pending:
                assert item.num_tokens == 1
                assert len(request.token_ids) <= item.start == len(tokens) - 1
            else:
                assert list(request.token_ids[item.start : end]) == tokens[item.start : end]
                assert len(request.token_ids) >= end
            assert item.samples == (end == len(tokens))
            values = self._values(request, tokens[:end])
            slots = self._slots(request, end)
            writes.append(slots[item.start :])
            self.kv.update(zip(slots[item.start :], values[item.start :], strict=True))
        for item in step.items:
            end = item.start + item.num_tokens
            values = self._values(item.request, self.tokens[item.request][:end])
            read = [self.kv.get(slot) for slot in self._slots(item.request, end)]
            assert read == values, f"{item.request.request_id} reads keys and values that are not its own"
        sampled = [choose() if item.samples else None for item in step.items]
        for item, token in zip(step.items, sampled, strict=True):
            if token is not None:
                self.tokens[item.request].append(token)
        return Launched(step, sampled, writes)

    def spoil(self, launched):
        """What a step wrote was wrong."""
        for slots in launched.writes:
            self.kv.update(dict.fromkeys(slots, "spoilt"))

    def _slots(self, request, end):
        return [request.kv.pages[at // self.page_size] * self.page_size + at % self.page_size for at in range(end)]

    def _values(self, request, tokens):
        value, values = hash(request.asked.cache_salt), []
        for token in tokens:
            value = hash((value, token))
            values.append(value)
        return values


def run_step(scheduler, device, token=1):
    """One plain step in which every request samples `token`. Returns the step and its results."""
    step = scheduler.next_step()
    launched = device.launch(step, lambda: token)
    results = scheduler.complete(step, launched.sampled)
    check_scheduler(scheduler)
    return step, results


def shape(step):
    """[(request id, tokens)], the way a reader thinks of a step."""
    return [(item.request.request_id, item.num_tokens) for item in step.items]
