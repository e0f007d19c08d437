"""A process for the second rank that is kept from one engine to the next: to start one takes seconds."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from enginery.config.schema import EngineOptions
from enginery.contracts.parallel import Death, LaunchPlan
from enginery.contracts.request import GenerationRequest, RequestOutput, SamplingParams, TokenLogprob
from enginery.engine.engine import Engine
from enginery.engine.ranks.local import COMMAND, LocalRanks
from enginery.errors import EnginError
from enginery.plugin.registry import Registry


class KeptRanks:
    """Implements `RunningRanks`: what ends an engine leaves the processes as they are. Give it as `launch`."""

    def __init__(self, count: int) -> None:
        self._ranks = LocalRanks([COMMAND] * count)
        self._count = count
        self.is_broken = False

    def __call__(self, plan: LaunchPlan) -> KeptRanks:
        assert plan.num_others == self._count
        return self

    def renew(self) -> None:
        """Start again what has ended. On this thread, because ranks end with the one that started them."""
        self.is_broken |= bool(self._ranks.poll())
        if self.is_broken:
            self._ranks.end(grace_s=0.0)
            self._ranks, self.is_broken = LocalRanks([COMMAND] * self._count), False

    def boot(self, rank: int, frame: bytes) -> None:
        self._ranks.boot(rank, frame)

    def name(self, rank: int) -> str:
        return self._ranks.name(rank)

    def poll(self) -> list[Death]:
        deaths = self._ranks.poll()
        self.is_broken |= bool(deaths)
        return deaths

    def dump_stacks(self) -> None:
        self._ranks.dump_stacks()

    def end(self, *, grace_s: float) -> None:
        """They wait for the next engine."""

    def stop(self) -> None:
        """The end of the tests."""
        self._ranks.end(grace_s=5.0)


@dataclasses.dataclass
class Told:
    """All that a request was told."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt: list[TokenLogprob | None] = dataclasses.field(default_factory=list)
    embedding: tuple[float, ...] = ()
    error: str | None = None
    num_cached: int = 0

    def take(self, output: RequestOutput) -> None:
        self.tokens += output.token_ids
        self.logprobs += output.logprobs or ()
        self.prompt += output.prompt_logprobs or ()
        self.embedding = output.embedding or self.embedding
        self.error, self.num_cached = output.error, max(self.num_cached, output.num_cached_tokens)


def request(name: str, prompt: Iterable[int], *, embed: bool = False, **params: object) -> GenerationRequest:
    asked = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params})
    return GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), params=asked, embed=embed)


def serve(engine: Engine, requests: Sequence[GenerationRequest], *, aborts: Sequence[str] = (), after: int = 3) -> dict[str, Told]:
    """Run the requests to their ends. aborts: those that are ended after so many steps."""
    told = {asked.request_id: Told() for asked in requests}
    for asked in requests:
        engine.submit(asked)
    steps = 0
    while engine.has_work:
        for output in engine.step():
            told[output.request_id].take(output)
        steps += 1
        if steps == after:
            for name in aborts:
                engine.abort(name)
    return {name: found for name, found in told.items() if name not in aborts}


@contextlib.contextmanager
def running(asked: EngineOptions, registry: Registry, kept: KeptRanks) -> Iterator[Engine]:
    """An engine, whose second rank, if it has one, is the kept process."""
    kept.renew()
    try:
        engine = Engine.build(asked, registry, launch=kept)
    except EnginError:
        kept.is_broken = True  # a rank that refuses ends, sooner or later
        raise
    try:
        yield engine
    finally:
        engine.close()


def on_ranks(
    asked: EngineOptions, registry: Registry, kept: KeptRanks, requests: Sequence[GenerationRequest], *, aborts: Sequence[str] = ()
) -> dict[str, Told]:
    """What an engine tells that is built for this."""
    with running(asked, registry, kept) as engine:
        return serve(engine, requests, aborts=aborts)
