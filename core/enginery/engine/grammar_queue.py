"""Compiling the grammars that requests ask for, beside the step loop. What cannot be compiled in time ends its request alone."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from enginery.contracts.grammars import (
    CompiledGrammar,
    Grammar,
    GrammarCompiler,
    GrammarKind,
    GrammarNeeds,
    GrammarSpec,
    GrammarState,
    GrammarTokens,
    UnfinishedGrammar,
)
from enginery.engine.grammar_budget import BoundedGrammar
from enginery.engine.grammar_lanes import CompileJob, Lane
from enginery.errors import EnginError, Overloaded, RequestError
from enginery.plugin.boundary import checked, inside
from enginery.plugin.records import Offer, absent_plugins
from enginery.plugin.registry import Registry
from enginery.plugin.selection import ranked, refusals
from enginery.text.tokenizer import Tokenizer

COMPILE_S: Final = 10.0  # from when a thread takes it up
QUEUE_S: Final = 10.0  # until one does
MAX_CACHED: Final = 64
USUAL: Final = Grammar(kind=GrammarKind.JSON_OBJECT)
_IDLE_S: Final = 0.005
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What grammars are compiled for. folder: of the tokenizer; read when the first grammar is asked for."""

    folder: Path
    vocab_size: int
    eos_token_ids: frozenset[int]

    def tokens(self) -> GrammarTokens:
        """Takes a second for a large one. Raises `CheckpointError`."""
        tokenizer = Tokenizer.from_folder(self.folder)
        found = tuple(tokenizer.token_bytes(token) if tokenizer.is_token(token) else b"" for token in range(self.vocab_size))
        special, encode = tokenizer.special_ids, partial(tokenizer.encode, add_special_tokens=False)
        return GrammarTokens(tokens=found, special_ids=special, eos_token_ids=self.eos_token_ids, encode=encode)


class Compilers:
    """The plugins' compilers, each loaded when it is first needed. Threads share it."""

    def __init__(self, registry: Registry, vocabulary: Vocabulary) -> None:
        self._offers: list[Offer[GrammarSpec]] = ranked(registry.offers(GrammarSpec))
        self._absent = absent_plugins(registry.records)
        self._vocabulary = vocabulary
        self._loading = threading.Lock()
        self._tokens: GrammarTokens | None = None
        self._loaded: dict[str, GrammarCompiler] = {}

    def choose(self, kind: GrammarKind) -> Offer[GrammarSpec]:
        """The best that compiles `kind`. Raises `RequestError` with every reason if none does."""
        needs = GrammarNeeds(kind=kind, vocab_size=self._vocabulary.vocab_size, num_eos=len(self._vocabulary.eos_token_ids))
        lines = [f"no plugin compiles the {kind} that the answer is to follow"]
        for offer in self._offers:
            reasons = [reason.text for reason in refusals(offer, needs)] if kind in offer.spec.kinds else ["it has not this kind"]
            if not reasons:
                return offer
            lines.append(f"{offer.source}: {'; '.join(reasons)}")
        raise RequestError("\n".join([*lines, *self._absent]), param="grammar")

    def compile(self, grammar: Grammar) -> CompiledGrammar | UnfinishedGrammar:
        """Raises `EnginError`, and so does the rest of what is left unfinished."""
        offer = self.choose(grammar.kind)

        def finish(rest: UnfinishedGrammar) -> CompiledGrammar:
            with inside(offer, f"compile a {grammar.kind}"):
                return BoundedGrammar(offer, checked(offer, rest.finish(), CompiledGrammar))

        with inside(offer, f"compile a {grammar.kind}"):
            found = self._compiler(offer).compile(grammar)
        if isinstance(found, UnfinishedGrammar):
            return UnfinishedGrammar(finish=partial(finish, found))
        return BoundedGrammar(offer, checked(offer, found, CompiledGrammar))

    def load(self) -> None:
        """Load all, so that no request pays for it; a failure is the first request's affair."""
        for offer in self._offers:
            with suppress(EnginError), inside(offer, "load"):
                self._compiler(offer)

    def _compiler(self, offer: Offer[GrammarSpec]) -> GrammarCompiler:
        with self._loading:
            if self._tokens is None:
                self._tokens = self._vocabulary.tokens()
            if offer.name not in self._loaded:
                _log.debug("grammars: %s, from %s", offer.name, offer.source)
                self._loaded[offer.name] = checked(offer, offer.spec.load(self._tokens), GrammarCompiler)
            return self._loaded[offer.name]


class GrammarQueue:
    """Requests that wait for their grammars. The step loop drives it and never waits for it while others have work.

    What is new gets a thread soon. What then turns out to take longer waits for one of two others, so that it holds nobody else up.
    What was compiled is kept, and so is what was refused, apart; one client's grammars push out its own first.
    """

    def __init__(self, compilers: Compilers) -> None:
        self._compilers = compilers
        self._quick, self._long = Lane(4, "grammar"), Lane(2, "long-grammar")
        self._jobs: dict[Grammar, CompileJob] = {}  # under way
        self._kept: OrderedDict[Grammar, CompileJob] = OrderedDict()
        self._refused: OrderedDict[Grammar, CompileJob] = OrderedDict()
        self._waiting: dict[str, tuple[CompileJob, float]] = {}  # and since when

    @property
    def num_waiting(self) -> int:
        """Requests whose grammars are not there yet."""
        return len(self._waiting)

    def check(self, grammar: Grammar) -> None:
        """Raise `RequestError` where no plugin can compile it."""
        self._compilers.choose(grammar.kind)

    def prepare(self) -> None:
        """Use a moment without work: begin with what most ask for."""
        if USUAL not in self._kept and USUAL not in self._jobs:
            with suppress(RequestError):
                self.check(USUAL)
                self._wanted(USUAL, "").num_waiting += 1
                self._quick.start()

    def begin(self, request_id: str, grammar: Grammar, client: str = "") -> None:
        """Have the grammar compiled, unless it is or was."""
        job = self._wanted(grammar, client)
        job.num_waiting += 1
        self._waiting[request_id] = (job, time.monotonic())
        self._quick.start()

    def drop(self, request_id: str) -> None:
        """Nobody waits for this request's grammar any more; one that is not begun is not compiled."""
        if request_id not in self._waiting:
            return
        job, _ = self._waiting.pop(request_id)
        job.num_waiting -= 1
        if not job.num_waiting and job.future is None and job.outcome is None:
            del self._jobs[job.grammar]

    def settled(self, *, idle: bool) -> Iterator[tuple[str, GrammarState | RequestError]]:
        """The requests that wait no longer, and what came of it. idle: wait a moment for the first of them."""
        if not (self._jobs or self._waiting):
            return
        self._take_in()
        if idle:
            self._wait_a_moment()
        for request_id, (job, since_s) in list(self._waiting.items()):
            found = _late(job, since_s) if job.outcome is None else job.outcome
            if found is not None:
                self.drop(request_id)
                yield request_id, found if isinstance(found, RequestError) else _begun(found)

    def _wait_a_moment(self) -> None:
        """Let the threads work, if requests wait and nothing of theirs is done yet."""
        if self._waiting and all(job.outcome is None for job, _ in self._waiting.values()):
            wait([job.future for job in self._jobs.values() if job.future], timeout=_IDLE_S, return_when=FIRST_COMPLETED)
            self._take_in()

    def _wanted(self, grammar: Grammar, client: str) -> CompileJob:
        for cache in (self._kept, self._refused):
            if grammar in cache:
                cache.move_to_end(grammar)
                return cache[grammar]
        if grammar not in self._jobs:
            work = partial(self._compilers.compile, grammar)
            self._jobs[grammar] = CompileJob(grammar=grammar, client=client, work=work, lane=self._quick)
        job = self._jobs[grammar]
        if job.future is None:
            job.lane.put(job, client)
        return job

    def _take_in(self) -> None:
        """What the threads have done, and begin what they have time for."""
        for job, future in [(job, job.future) for job in self._jobs.values()]:
            if future is None or not future.done():
                continue
            found = _outcome(future)
            if isinstance(found, UnfinishedGrammar) and job.num_waiting:
                job.go_on(found.finish, self._long)
                continue
            del self._jobs[job.grammar]
            if isinstance(found, UnfinishedGrammar):
                continue
            job.outcome = found
            if not isinstance(found, Overloaded):
                cache = self._refused if isinstance(found, RequestError) else self._kept
                cache[job.grammar] = job
                _shrink(cache)
        self._quick.start()
        self._long.start()


def _begun(found: CompiledGrammar) -> GrammarState | RequestError:
    try:
        return found.start()
    except RequestError as error:
        return error


def _late(job: CompileJob, since_s: float) -> RequestError | None:
    """What a request is told that has waited too long: for its turn, which is nobody's fault, or for its grammar."""
    waited_s = time.monotonic() - max(job.since_s, since_s)
    if job.future is None and waited_s >= QUEUE_S:
        message = f"the threads that compile grammars were busy with others for {QUEUE_S:g} s; send the request again later"
        return Overloaded(message, param="grammar")
    if job.future is not None and time.monotonic() - job.since_s >= COMPILE_S:
        return RequestError(f"the grammar was not compiled within {COMPILE_S:g} s; make it smaller", param="grammar")
    return None


def _outcome(future: Future[CompiledGrammar | UnfinishedGrammar]) -> CompiledGrammar | UnfinishedGrammar | RequestError:
    """Whatever a plugin raised, it ends no more than the requests for this grammar."""
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, RequestError):
        return error
    shown = str(error) if isinstance(error, EnginError) else f"{type(error).__name__}: {error}"
    return RequestError(f"the grammar could not be compiled: {shown}", param="grammar")


def _shrink(cache: OrderedDict[Grammar, CompileJob]) -> None:
    """Down to the bound: the oldest of the client that has most in it goes, and never the usual one."""
    while len(cache) > MAX_CACHED:
        owners = Counter(job.client for grammar, job in cache.items() if grammar != USUAL)
        greediest = owners.most_common(1)[0][0]
        del cache[next(grammar for grammar, job in cache.items() if job.client == greediest and grammar != USUAL)]
