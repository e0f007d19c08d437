"""Pages of each kind of memory over an hour of mixed use: `python docs/benchmarks/kinds_hour.py --seconds 3600 > FILE`.

Engines of tiny models with random weights on a CPU, a process for each of `SHAPES`: layers are few and narrow, but a state, or a
token of a window's layers, takes as many times the bytes of a token of FULL as in the real model (`proportions` in the report).

Users (`chat`, `shared_task`, `document`, `question`) come at random, more in bursts and few in quiet minutes. A second (`Second`)
is what the engine tells of its pages and how many it evicted, and what only this script knows:

- stranded: cached pages of FULL that no resume point is at or behind, so that no prompt can use them.
- live: resume points that were given up for want of pages of a kind, and that a later prompt would have gone on from: it has the
  prefix of such a point, and was resumed before it. Of several the last one counts, at the second in which it was given up.

With `--simulated` nothing is computed: steps take the time of `Simulated`, an hour passes in minutes, and users may be many.

A kind idles in a second if more than `IDLE` of its pages are free; FULL also if they are free or stranded (`idle_or_stranded`).
Counted is the part of all seconds in which a kind idles while another one gives up live prefixes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import heapq
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from enginery.bench.workloads import shapes
from enginery.config.schema import EngineOptions
from enginery.contracts.batch import FULL, WINDOW
from enginery.contracts.engine import EngineStats
from enginery.contracts.request import GenerationRequest, RequestOutput, SamplingParams
from enginery.contracts.step import StepOutput, StepTimes
from enginery.engine.engine import Engine
from enginery.kv.pages import PageAllocator
from enginery.kv.pool import page_bytes
from enginery.kv.prefix import PrefixNode, RadixPrefixCache
from enginery.kv.resume import ResumePoint
from enginery.kv.states import state_bytes
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose
from enginery.worker.memory_plan import no_pages

VOCABULARY, PAGE, IDLE = 512, 16, 0.3
NARROW = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1,
    "head_dim": 8, "vocab_size": VOCABULARY, "eos_token_id": None,
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "qwen3-next-80b-32",
        {
            "full_attention_interval": 2, "linear_num_key_heads": 1, "linear_num_value_heads": 6, "linear_key_head_dim": 64,
            "linear_value_head_dim": 64, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
        },
    ),
    "gpt-oss": (
        "gpt-oss-120b",
        {"layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}  # fmt: skip
MOST_TOKENS, MOST_REQUESTS, MOST_WAITING = 16384, 32, 32


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


@dataclass(slots=True)
class GivenUp:
    """A resume point that was given up in that second for want of pages of this kind."""

    second: int
    kind: str
    position: int


class Watch:
    """Told by a prefix cache what comes and goes (`PrefixWatcher`). Prefixes of whole pages are known by hashes.

    second: now. live: by kind, in which seconds it gave up prefixes that were asked for later.
    """

    def __init__(self, cache: RadixPrefixCache) -> None:
        self.second = 0
        self.live: dict[str, Counter[int]] = {}
        self.num_given_up: Counter[str] = Counter()
        self._kind: str | None = None
        self._hash_of_page: dict[int, int] = {}
        self._hash_of_point: dict[ResumePoint, int] = {}
        self._gone: dict[int, GivenUp] = {}
        assert cache.points is not None
        cache._watcher, cache.points._given_up = self, self.given_up
        self._evict_full, self._evict_points = cache.evict, cache.points.evict
        cache.evict, cache.points.evict = self._evict, self._evict_other  # type: ignore[method-assign]

    def _evict(self, num_pages: int) -> int:
        self._kind = FULL
        freed = self._evict_full(num_pages)
        self._kind = None
        return freed

    def _evict_other(self, kind: str, num_free: int) -> None:
        self._kind = kind
        self._evict_points(kind, num_free)  # type: ignore[arg-type]
        self._kind = None

    def stored(self, parent: int | None, tokens: bytes, pages: Sequence[int], salt: str) -> None:
        before = 0 if parent is None else self._hash_of_page[parent]
        self._hash_of_page.update(zip(pages, hashes(before, tokens), strict=True))

    def removed(self, pages: Sequence[int]) -> None:
        for page in pages:
            del self._hash_of_page[page]

    def resumable(self, point: ResumePoint, tokens: bytes, pages: Sequence[int], salt: str) -> None:
        self._hash_of_point[point] = self._hash_of_page[pages[-1]]

    def given_up(self, point: ResumePoint) -> None:
        known = self._hash_of_point.pop(point, None)
        if known is not None and self._kind is not None:
            self.num_given_up[self._kind] += 1
            self._gone[known] = GivenUp(self.second, self._kind, point.position)

    def entered(self, prompt: Sequence[int], num_cached: int) -> None:
        """A request that was resumed behind `num_cached` tokens: the last point that it lacked was live."""
        whole = (len(prompt) - 1) // PAGE * PAGE
        known = list(hashes(0, torch.tensor(prompt[:whole], dtype=torch.int32).numpy().tobytes()))
        for prefix in reversed(known[num_cached // PAGE :]):
            if (gone := self._gone.pop(prefix, None)) is not None:
                self.live.setdefault(gone.kind, Counter())[gone.second] += 1
                return


def hashes(before: int, tokens: bytes) -> Iterator[int]:
    """Of the prefixes that end with each page of these tokens."""
    for start in range(0, len(tokens), 4 * PAGE):
        before = hash((before, tokens[start : start + 4 * PAGE]))
        yield before


class Pages(NamedTuple):
    """Of one kind. held: in use by requests. cached: kept for the prefix cache alone. evicted: since the start."""

    total: int
    free: int
    held: int
    cached: int
    stranded: int
    evicted: int


@dataclass(slots=True)
class Second:
    """What was so at the end of a second since the start."""

    second: int
    running: int
    waiting: int
    preempted: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests: int
    pages: dict[str, Pages] = field(default_factory=dict)


def num_stranded(node: PrefixNode) -> int:
    """Pages below that can be given up and that no resume point is at or behind."""
    stranded, order = 0, list[PrefixNode]()
    stack = [node]
    while stack:
        order.append(at := stack.pop())
        stack.extend(at.children.values())
    useful = set[PrefixNode]()
    for at in reversed(order):
        if at in useful or (at.point is not None and not at.point.is_dropped):
            if at.parent is not None:
                useful.add(at.parent)
        elif at.num_locks == 0:
            stranded += len(at.pages)
    return stranded


def pages_of(engine: AnyEngine) -> dict[str, Pages]:
    kv = engine._scheduler._kv
    cache, full = kv.cache, kv.allocator
    counts = engine._scheduler.pages
    idle, stranded = cache.num_evictable, num_stranded(cache.root)
    found = {
        FULL: Pages(full.num_pages, full.num_free, full.num_pages - full.num_free - idle, idle, stranded, counts[FULL].evicted)
    }
    kinds: dict[str, PageAllocator] = dict(kv.finite.allocators)
    for kind, other in kinds.items():
        held = other.num_pages - other.num_free - other.num_idle
        found[kind] = Pages(other.num_pages, other.num_free, held, other.num_idle, 0, counts[kind].evicted)
    return found


class Clock:
    """Seconds since the start."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._began

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class StandingClock(Clock):
    """One that only `sleep` moves."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


class Simulated:
    """An engine that schedules and computes nothing. step_s, prompt_s, decode_s: of each step, and of each row of either sort."""

    step_s, prompt_s, decode_s = 0.005, 0.0004, 0.001  # about what the hybrid takes on one busy core of this page's machine

    def __init__(self, engine: Engine, clock: StandingClock) -> None:
        self._engine, self._clock, self._draw, self._num_preempted = engine, clock, random.Random(2), 0
        self._scheduling, self._scheduler = engine._scheduling, engine._scheduler
        self.submit, self.abort, self.meter = engine.submit, engine.abort, self

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def stats(self) -> EngineStats:
        return dataclasses.replace(self._engine.meter.stats(), num_preempted=self._num_preempted)

    def step(self) -> list[RequestOutput]:
        step = self._scheduler.next_step()
        self._num_preempted += len(self._scheduler.preempted)
        if not step.items:
            return []
        items = step.columns()
        num_prompt = int(items.num_tokens[step.num_decode :].sum())
        self._clock.sleep(self.step_s + num_prompt * self.prompt_s + step.num_decode * self.decode_s)
        tokens = [(self._draw.randrange(10, VOCABULARY),) if samples else () for samples in items.samples.tolist()]
        told = StepOutput(
            number=step.number,
            token_ids=tokens,
            logprobs={},
            prompt_logprobs={},
            embeddings={},
            failed={},
            captured=False,
            times=StepTimes(0.0, 0.0, 0.0, 0.0),
        )
        return self._scheduler.complete(step, told)


AnyEngine = Engine | Simulated


def drive(
    engine: AnyEngine, load: Load, *, seconds: int, clock: Clock, tell: Callable[[Second], None]
) -> tuple[list[Second], Watch]:
    """So many seconds of use. tell: is given each second."""
    (cache,) = engine._scheduling.caches
    assert isinstance(cache, RadixPrefixCache)
    watch, found = Watch(cache), list[Second]()
    tokens: Counter[str] = Counter()
    while (now := clock.now_s()) < seconds:
        while len(found) < int(now):
            found.append(second_of(engine, len(found), tokens))
            watch.second = len(found)
            tell(found[-1])
        load.act(now, engine.submit, engine.abort)
        if not engine.has_work:
            clock.sleep(max(0.0, min(load.next_s, len(found) + 1) - clock.now_s()))
            continue
        for output in engine.step():
            if output.token_ids and (prompt := load.prompts.pop(output.request_id, None)) is not None:
                watch.entered(prompt, output.num_cached_tokens)
                tokens.update(prompt=len(prompt), cached=output.num_cached_tokens, requests=1)
            tokens["output"] += len(output.token_ids)
            load.told(output, clock.now_s(), engine.submit)
    return found, watch


def second_of(engine: AnyEngine, second: int, tokens: Counter[str]) -> Second:
    stats = engine.meter.stats()
    return Second(
        second=second,
        running=stats.num_running,
        waiting=stats.num_waiting,
        preempted=stats.num_preempted,
        prompt_tokens=tokens["prompt"],
        cached_tokens=tokens["cached"],
        output_tokens=tokens["output"],
        requests=tokens["requests"],
        pages=pages_of(engine),
    )


def summary(found: Sequence[Second], watch: Watch) -> dict[str, Any]:
    """What comes of it: for each kind, and of requests."""
    kinds = list(found[-1].pages)
    live = {kind: watch.live.get(kind, Counter[int]()) for kind in kinds}
    by_kind: dict[str, Any] = {}
    for kind in kinds:
        pages = [second.pages[kind] for second in found]
        others = {at for other in kinds if other != kind for at in live[other]}
        idle = {second.second for second in found if second.pages[kind].free > IDLE * second.pages[kind].total}
        useless = {at.second for at in found if at.pages[kind].free + at.pages[kind].stranded > IDLE * at.pages[kind].total}
        means = {name: sum(getattr(each, name) for each in pages) / len(pages) for name in ("free", "held", "cached", "stranded")}
        by_kind[kind] = {
            "total": pages[-1].total,
            "mean": {name: round(mean / max(pages[-1].total, 1), 4) for name, mean in means.items()},
            "evicted": pages[-1].evicted,
            "points_given_up": watch.num_given_up[kind],
            "live_points_given_up": live[kind].total(),
            "seconds_with_live_given_up": len(live[kind]),
            "idle": len(idle) / len(found),
            "idle_while_another_gives_up_live": len(idle & others) / len(found),
            "idle_or_stranded_while_another_gives_up_live": len(useless & others) / len(found),
        }
    last = found[-1]
    return {
        "kinds": by_kind,
        "hit_rate": last.cached_tokens / max(last.prompt_tokens, 1),
        "prompt_tokens": last.prompt_tokens,
        "output_tokens": last.output_tokens,
        "requests": last.requests,
        "mean_request": round((last.prompt_tokens + last.output_tokens) / max(last.requests, 1)),
        "preempted": last.preempted,
        "mean_running": sum(second.running for second in found) / len(found),
        "mean_waiting": sum(second.waiting for second in found) / len(found),
    }


class Run(NamedTuple):
    """One engine. rate: of users, a second on average."""

    name: str
    shape: str
    kv_gib: float
    rate: float
    expected_tokens: int = EngineOptions().expected_tokens


RUNS = (
    Run("qwen3-next", "qwen3-next", kv_gib=0.006, rate=0.2),
    Run("qwen3-next, told the mean request", "qwen3-next", kv_gib=0.006, rate=0.2, expected_tokens=2500),
    Run("gpt-oss", "gpt-oss", kv_gib=0.004, rate=0.3),
)


def write_config(run: Run, folder: Path, changes: Mapping[str, Any]) -> Path:
    """The real model's, but for `changes`, of which None removes a key."""
    config = {**shapes()[SHAPES[run.shape][0]], "quantization_config": None, **changes}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def options_of(run: Run, folder: Path) -> EngineOptions:
    return EngineOptions(
        model=str(folder),
        load_format="dummy",
        dtype="bfloat16",
        device="cpu",
        num_threads=1,
        page_size=PAGE,
        max_model_len=MOST_TOKENS,
        max_batch_requests=MOST_REQUESTS,
        max_batch_tokens=2048,
        expected_tokens=run.expected_tokens,
        kv_memory_gib=run.kv_gib,
    )


def measured(run: Run, seconds: int, progress: Path | None, *, simulated: bool = False) -> dict[str, Any]:
    """The report of one engine. progress: a file to which each second is appended."""

    def tell(second: Second) -> None:
        if progress is not None:
            with progress.open("a") as file:
                file.write(json.dumps({"run": run.name, **as_json(second)}) + "\n")

    with tempfile.TemporaryDirectory() as temporary:
        folder = write_config(run, Path(temporary) / "here", {**NARROW, **SHAPES[run.shape][1]})
        options, real = options_of(run, folder), write_config(run, Path(temporary) / "real", {})
        engine = Engine.build(dataclasses.replace(options, graphs=not simulated), Registry.load())
        clock = StandingClock() if simulated else Clock()
        driven = Simulated(engine, clock) if isinstance(clock, StandingClock) else engine
        load = Load(seed=1, rate=run.rate)
        found, watch = drive(driven, load, seconds=seconds, clock=clock, tell=tell)
        engine.close()
        told: dict[str, Any] = {"run": run._asdict(), "memory_plan": engine.facts.memory_plan}
        told["in_tokens_of_full"] = {"here": proportions(folder, options), "real": proportions(real, options)}
    told |= {"users": dict(load.counts), "summary": summary(found, watch), "minutes": minutes(found, watch)}
    return told


def proportions(config: Path, options: EngineOptions) -> dict[str, float]:
    """What a state, and what a token of layers with windows takes, in tokens of FULL."""
    geometry = no_pages(choose(dataclasses.replace(options, model=str(config)), Registry.load()))
    full = page_bytes(geometry)
    found = {"state": PAGE * state_bytes(geometry) / full, "window": page_bytes(geometry, WINDOW) / full}
    return {name: round(value, 2) for name, value in found.items() if value}


def minutes(found: Sequence[Second], watch: Watch) -> list[dict[str, Any]]:
    """The last second of each minute, and how many live points each kind gave up in it."""
    told = []
    for last in found[59::60] or found[-1:]:
        span = range(last.second - 59, last.second + 1)
        live = {kind: sum(at[second] for second in span) for kind, at in watch.live.items()}
        told.append({**as_json(last), "live_points_given_up": live})
    return told


def as_json(second: Second) -> dict[str, Any]:
    return {**dataclasses.asdict(second), "pages": {kind: pages._asdict() for kind, pages in second.pages.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--runs", nargs="*", default=[run.name for run in RUNS], choices=[run.name for run in RUNS])
    parser.add_argument("--rate", type=float, default=1.0, help="times as many users")
    parser.add_argument("--simulated", action="store_true", help="compute nothing")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--progress", type=Path, help="file to which each second is appended")
    asked = parser.parse_args()
    runs = [run._replace(rate=asked.rate * run.rate) for run in RUNS if run.name in asked.runs]
    measure = functools.partial(measured, seconds=asked.seconds, progress=asked.progress, simulated=asked.simulated)
    with ProcessPoolExecutor(len(runs), mp_context=get_context("spawn")) as pool:
        found = list(pool.map(measure, runs))
    report: dict[str, Any] = {"command": " ".join(sys.argv), "commit": asked.commit, "seconds": asked.seconds}
    report["versions"] = {"python": sys.version.split()[0], "torch": torch.__version__}
    print(json.dumps({**report, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
