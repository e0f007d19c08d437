"""Drives an engine at random: requests come, are aborted at whatever stage they are, and each must get what it asked for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from integrity import check_scheduler

from enginery.contracts.request import GenerationRequest, RequestOutput
from enginery.engine.engine import Engine
from enginery.errors import QueueFull


def evict_everything(engine: Engine) -> None:
    """All that the prefix cache may give up."""
    kv = engine._scheduler._kv
    for point in list(kv.cache.points or ()):
        kv.cache.points.drop(point)  # type: ignore[union-attr]
    kv.cache.evict(kv.cache.num_evictable)


@dataclass
class RandomUse:
    """One engine, and what its requests have got.

    make_request: a request of the name that it is given. alive: request id -> the request and its tokens so far. counts: of
    requests that arrived, were refused by a full queue, finished, failed and were aborted, of tokens, outputs and steps.
    """

    engine: Engine
    chance: random.Random
    make_request: Callable[[str], GenerationRequest]
    alive: dict[str, tuple[GenerationRequest, list[int]]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def submit(self) -> None:
        """One more request, unless the queue is full."""
        request = self.make_request(f"r{self.counts['arrived'] + self.counts['refused']}")
        try:
            self.engine.submit(request)
        except QueueFull:
            self.counts["refused"] += 1
            return
        self.counts["arrived"] += 1
        self.alive[request.request_id] = request, []

    def abort_one(self) -> None:
        """At whatever stage it is."""
        name = self.chance.choice(list(self.alive))
        self.engine.abort(name)
        del self.alive[name]
        self.counts["aborted"] += 1

    def step(self) -> None:
        """One step, and what it tells."""
        for output in self.engine.step():
            self._take(output)
        self.counts["steps"] += 1

    def turns(
        self, count: int, *, arrivals: float, aborts: float, evict_each: int
    ) -> Collection[tuple[GenerationRequest, list[int]]]:
        """So many steps, then until nothing is left. All requests that came, with what they were told, aborted ones as far.

        arrivals, aborts: how probable one is before a step. evict_each: so seldom the prefix cache is emptied before one.
        """
        told: dict[str, tuple[GenerationRequest, list[int]]] = {}
        for turn in range(count):
            if self.chance.random() < arrivals:
                self.submit()
            if self.alive and self.chance.random() < aborts:
                self.abort_one()
            if turn % evict_each == evict_each - 1:
                evict_everything(self.engine)
            told |= self.alive
            self.step()
            check_scheduler(self.engine._scheduler)
        told |= self.alive
        self.drain()
        return told.values()

    def drain(self) -> None:
        """Step until nothing is left to do."""
        while self.engine.has_work:
            self.step()

    def _take(self, output: RequestOutput) -> None:
        """Check what a request is told. Only a grammar may fail."""
        assert output.request_id in self.alive, f"{output.request_id} had ended"
        request, tokens = self.alive[output.request_id]
        params = request.params
        self.counts["outputs"] += 1
        if output.error is not None:
            assert params.grammar is not None, output.error
            self._end(output.request_id, "failed")
        elif not output.is_answer:
            first = not tokens
            tokens += output.token_ids
            self.counts["tokens"] += len(output.token_ids)
            prompt_logprobs = first and params.prompt_logprobs is not None
            assert len(output.prompt_logprobs or ()) == (len(request.prompt_token_ids) if prompt_logprobs else 0)
            assert len(output.logprobs or ()) == (len(output.token_ids) if params.logprobs is not None else 0)
            assert (output.embedding is not None) == (first and request.embed)
            assert len(tokens) <= params.max_tokens
            if output.finish_reason is not None:
                self._end(output.request_id, "finished")

    def _end(self, name: str, how: str) -> None:
        del self.alive[name]
        self.counts[how] += 1
