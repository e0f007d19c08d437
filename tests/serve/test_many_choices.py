"""The choices of one prompt are sent, routed and kept as one prompt, and messages do not hold up the steps of those that run."""

from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_engine import FakeEngine

from enginery.config.schema import EngineOptions
from enginery.contracts.request import GenerationRequest, RequestOutput, SamplingParams, choices_of
from enginery.schedule.routing import Candidate
from enginery.serve.engine import messages, process, replicas
from enginery.serve.engine.outputs import Sent, generate
from enginery.serve.engine.process import EngineLoop
from enginery.serve.engine.sent_prefixes import SentPrefixes
from enginery.serve.http.metrics import RequestMeter

PROMPT = tuple(range(300, 500))


def choices(name: str, count: int, *, prompt: tuple[int, ...] = PROMPT, **params: Any) -> list[GenerationRequest]:
    asked = GenerationRequest(request_id=name, prompt_token_ids=prompt, params=SamplingParams(n=count, **params), priority=3)
    return choices_of(asked)


class Link:
    """Brings these messages, and keeps what is told."""

    def __init__(self, *brought: messages.ToEngine) -> None:
        self.frames, self.told = deque(map(messages.encode, brought)), list[Any]()

    def poll(self, timeout_ms: int) -> bool:
        return bool(self.frames)

    def recv(self) -> bytes:
        return self.frames.popleft()

    def send(self, frame: bytes) -> None:
        self.told.append(messages.decode_from_engine(frame))


class Noting(FakeEngine):
    """Notes what it was told."""

    def __init__(self) -> None:
        super().__init__(EngineOptions(model="any"))
        self.noted: list[str] = []
        self.seen: list[GenerationRequest] = []

    def submit(self, request: GenerationRequest) -> None:
        self.noted.append(request.request_id)
        self.seen.append(request)
        super().submit(request)

    def abort(self, request_id: str) -> None:
        self.noted.append(f"abort {request_id}")
        super().abort(request_id)

    def step(self) -> list[RequestOutput]:
        self.noted.append("step")
        return super().step()


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_the_engine_steps_while_many_choices_arrive_and_an_abort_stays_behind_them(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_TAKING_S", seconds)
    asked, engine = choices("x", 12, seed=5), Noting()
    names = [each.request_id for each in asked]
    link = Link(messages.Submit.of(asked), messages.Abort("x-11"), messages.Stop())
    EngineLoop(engine, cast(Any, link)).run()
    assert [said for said in engine.noted if said != "step"] == [*names, "abort x-11"]
    assert engine.noted[: 2 * len(names)] == [said for name in names for said in (name, "step")] or seconds
    assert engine.noted.count("step") == (0 if seconds else len(names) + 1)
    assert engine.seen == asked
    assert len({id(request.prompt_token_ids) for request in engine.seen}) == 1, "each choice has a prompt of its own"
    assert [said.request_id for said in link.told if isinstance(said, messages.Queued)] == names


def test_one_choice_that_is_refused_is_told_of_alone() -> None:
    asked = choices("x", 3)
    asked[1:2] = choices("y", 1, max_tokens=1000)
    link = Link(messages.Submit.of(asked), messages.Stop())
    EngineLoop(Noting(), cast(Any, link)).run()
    answers = [(type(said), said.request_id) for said in link.told if isinstance(said, messages.Queued | messages.Rejected)]
    assert answers == [(messages.Queued, "x-0"), (messages.Rejected, "y-0"), (messages.Queued, "x-2")]


class Client:
    """Of an engine that accepts everything. sent: the messages."""

    def __init__(self) -> None:
        self.groups: dict[str, Any] = {}
        self.died, self.is_stopping, self.meter = asyncio.get_running_loop().create_future(), False, RequestMeter()
        self.progress = SimpleNamespace(moved=lambda: None)
        self.sent: list[messages.ToEngine] = []

    async def send(self, message: messages.ToEngine) -> None:
        self.sent.append(message)
        if isinstance(message, messages.Submit):
            for request in message.requests:
                self.groups[request.request_id].answer(messages.Queued(request.request_id))


def test_a_prompt_is_sent_once_for_all_of_its_choices() -> None:
    async def scenario() -> None:
        one, other = (cast(Any, Client()) for _ in range(2))
        first, second = choices("x", 5, seed=3), choices("y", 2, prompt=(7, 8))
        placed = [(one, first[:3]), (other, first[3:]), (one, second)]
        async with generate([Sent(client, request) for client, several in placed for request in several]):
            submitted = [(client, [said.whole() for said in client.sent]) for client in (one, other)]
        assert submitted == [(one, [first[:3], second]), (other, [first[3:]])]
        assert {said.request_id for said in one.sent[2:]} == {each.request_id for each in (*first[:3], *second)}  # aborts

    asyncio.run(scenario())


class Replica:
    """One that serves, and counts how often a prompt's blocks are gone through."""

    def __init__(self) -> None:
        self.prefixes, self.facts, self.asked = SentPrefixes(), SimpleNamespace(num_pages=1000, page_size=16), 0
        self.client = SimpleNamespace(options=SimpleNamespace(page_size=16, prefix_cache=True))

    def candidate(self, hashes: list[bytes], block_size: int, planned: tuple[int, int]) -> Candidate:
        self.asked += 1
        known = self.prefixes.num_known(hashes) * block_size
        return Candidate(serves=True, is_silent=False, is_full=False, waiting=planned[1], cached=known, num_sent=planned[0])


def test_the_choices_of_a_prompt_are_routed_once_and_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[int] = []
    add = SentPrefixes.add
    monkeypatch.setattr(
        SentPrefixes, "add", lambda self, hashes, *, most: (added.append(len(hashes)), add(self, hashes, most=most))
    )
    both, asked = [Replica(), Replica()], [*choices("x", 100), *choices("y", 3, prompt=PROMPT[::-1])]
    sent = replicas._routed(cast(Any, both), asked)
    assert [each.request for each in sent] == asked
    assert added == [3, 3]
    assert [replica.asked for replica in both] == [2, 2]
    where = [both.index(next(one for one in both if one.client is each.client)) for each in sent]
    assert where == [where[0]] * 100 + [1 - where[0]] * 3
    assert [each.num_known for each in sent] == [0] + [192] * 99 + [0, 192, 192]
