"""The users of `kinds_hour.py`: `chat`, `shared_task`, `document`, `question`.

They come at random, more in bursts and few in quiet minutes.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Generator
from typing import NamedTuple

from enginery.contracts.request import GenerationRequest, RequestOutput, SamplingParams

VOCABULARY, MOST_WAITING = 512, 32


class Ask(NamedTuple):
    """A user's request. patience_s: after which it is aborted, unless it was answered."""

    tokens: tuple[int, ...]
    max_tokens: int
    patience_s: float | None = None


User = Generator[Ask | float, list[int], None]  # asks, and is sent the answer; or waits for so many seconds


class Words:
    """Random tokens and lengths."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.systems = [self.some(self.draw.randint(300, 2000)) for _ in range(6)]
        self.tasks = [self.some(self.draw.randint(1500, 4000)) for _ in range(4)]

    def some(self, count: float) -> list[int]:
        return [self.draw.randrange(10, VOCABULARY) for _ in range(int(count))]

    def length(self, median: float, *, most: int) -> int:
        """Long tails, as lengths of texts have."""
        return max(4, min(most, int(self.draw.lognormvariate(0, 0.8) * median)))

    def patience(self) -> float | None:
        return self.draw.uniform(0.1, 3) if self.draw.random() < 0.05 else None


def chat(words: Words) -> User:
    """Turns that repeat all before them. Some are asked again in other words, a branch. Who loses patience leaves."""
    draw, told = words.draw, [*words.draw.choice(words.systems)]
    for _ in range(1 + int(draw.expovariate(1 / 6))):
        asked = told + words.some(words.length(100, most=2000))
        patience = words.patience()
        answer = yield Ask(tuple(asked), words.length(120, most=600), patience)
        if patience is not None:
            return
        if draw.random() >= 0.15:
            told = asked + answer
        if len(told) > 12000:
            return
        yield draw.expovariate(1 / 60)


def shared_task(words: Words) -> User:
    """One of few long instructions, and something short to apply it to."""
    yield Ask(tuple(words.draw.choice(words.tasks) + words.some(words.length(80, most=800))), words.length(30, most=200))


def document(words: Words) -> User:
    """A long text that nobody else has, and one question about it, now and then some more."""
    text = words.some(words.length(5000, most=14000))
    yield Ask(tuple(text + words.some(40)), words.length(150, most=600), words.patience())
    while words.draw.random() < 0.3:
        yield words.draw.expovariate(1 / 60)
        yield Ask(tuple(text + words.some(40)), words.length(150, most=600))


def question(words: Words) -> User:
    """Short, and once only."""
    yield Ask(tuple(words.some(words.length(120, most=1000))), words.length(150, most=600), words.patience())


USERS: dict[Callable[[Words], User], float] = {chat: 0.35, shared_task: 0.35, document: 0.08, question: 0.22}


def arrivals_per_s(at_s: float) -> float:
    """Of users, 1 on average but for bursts and quiet minutes."""
    if at_s % 200 < 20:
        return 4.0
    return 0.1 if at_s % 600 >= 540 else 1.0


class Load:
    """The users of one engine, who wait in a queue by when they do something next. rate: of arrivals, users a second."""

    def __init__(self, *, seed: int, rate: float) -> None:
        self.words = Words(seed)
        self._rate = rate
        self._numbers = itertools.count()
        self._next_s = 0.0
        self._waiting: list[tuple[float, int, User]] = []
        self._impatient: list[tuple[float, str]] = []
        self._asking: dict[str, tuple[User, list[int]]] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}  # of requests that were told nothing yet
        self.counts: Counter[str] = Counter()

    def act(self, now_s: float, submit: Callable[[GenerationRequest], None], abort: Callable[[str], None]) -> None:
        """Whatever users do until now."""
        while self._next_s <= now_s:
            self._next_s += self.words.draw.expovariate(self._rate * arrivals_per_s(self._next_s))
            kind = self.words.draw.choices(list(USERS), list(USERS.values()))[0]
            if len(self.prompts) >= MOST_WAITING:
                self.counts["turned away"] += 1
                continue
            self.counts[kind.__name__] += 1
            user = kind(self.words)
            self._take(user, next(user), now_s, submit)
        while self._waiting and self._waiting[0][0] <= now_s:
            _, _, user = heapq.heappop(self._waiting)
            self._go_on(user, [], now_s, submit)
        while self._impatient and self._impatient[0][0] <= now_s:
            _, request_id = heapq.heappop(self._impatient)
            if (asking := self._asking.pop(request_id, None)) is not None:
                self.counts["aborted"] += 1
                self.prompts.pop(request_id, None)
                abort(request_id)
                self._go_on(asking[0], [], now_s, submit)

    def told(self, output: RequestOutput, now_s: float, submit: Callable[[GenerationRequest], None]) -> None:
        """What the engine answers."""
        assert output.error is None, output.error
        if output.request_id not in self._asking:
            return
        user, answer = self._asking[output.request_id]
        answer += output.token_ids
        if output.is_last:
            del self._asking[output.request_id]
            self._go_on(user, answer, now_s, submit)

    @property
    def next_s(self) -> float:
        """When users do something next."""
        queues = (self._waiting, self._impatient)
        return min([self._next_s, *(queue[0][0] for queue in queues if queue)])

    def _go_on(self, user: User, answer: list[int], now_s: float, submit: Callable[[GenerationRequest], None]) -> None:
        try:
            self._take(user, user.send(answer), now_s, submit)
        except StopIteration:
            self.counts["users left"] += 1

    def _take(self, user: User, does: Ask | float, now_s: float, submit: Callable[[GenerationRequest], None]) -> None:
        if isinstance(does, float):
            heapq.heappush(self._waiting, (now_s + does, next(self._numbers), user))
            return
        request_id = f"r{next(self._numbers)}"
        self.prompts[request_id], self._asking[request_id] = does.tokens, (user, [])
        if does.patience_s is not None:
            heapq.heappush(self._impatient, (now_s + does.patience_s, request_id))
        params = SamplingParams(max_tokens=does.max_tokens, temperature=1.0, ignore_eos=True)
        submit(GenerationRequest(request_id=request_id, prompt_token_ids=does.tokens, params=params))
