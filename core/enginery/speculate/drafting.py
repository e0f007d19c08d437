"""Asks a drafter what the requests that decode may go on with: what it guesses is verified in the next step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence, Sized
from itertools import takewhile
from operator import index
from typing import Final, NamedTuple

from enginery.contracts.drafting import DraftAsk, DraftContext, DrafterSpec, DraftTree, HostDrafter
from enginery.contracts.grammars import RevocableGrammarState
from enginery.contracts.request import RequestOutput
from enginery.contracts.step import StepInput
from enginery.errors import EnginError, PluginError
from enginery.plugin.boundary import checked, gives_trees, inside
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery.schedule.request import Request
from enginery.schedule.table import RequestTable
from enginery.speculate.asked_tokens import AskedTokens
from enginery.speculate.combs import num_verified
from enginery.speculate.length import DraftLength
from enginery.speculate.made_drafts import MadeDrafts

_MOST_TOKENS_OF_A_TRIAL: Final = 2048  # of a burst of prompts, following alone would take as long as the verifications
_MOST_UNFOLLOWED: Final = 0.25  # of a request's tokens: trials without guesses leave a few such everywhere
_log: Final = logging.getLogger(__name__)


class _Published(NamedTuple):
    """A step that decoded only: its requests, the tokens that it verified of each, how many it guessed ahead, when it was told, and
    whether the next one waited for that, see `Drafting.waits`."""

    num_requests: int
    verified: int
    made: int
    at_s: float
    waited_for: bool


class Drafting:
    """One drafter, and where it is from; of a draft model what it has made. lengths: drafts of a request in one step.

    on_device: what it makes is on the device alone when the next step is scheduled. failure: why it is asked no more.
    """

    def __init__(
        self,
        drafter: HostDrafter | MadeDrafts,
        offer: Offer[DrafterSpec],
        *,
        length: DraftLength,
        vocab_size: int,
        gives_trees: bool = False,
        on_device: bool = False,
    ) -> None:
        self._gives_trees, self._on_device, self._clock = gives_trees, on_device, time.perf_counter
        self._before: _Published | None = None
        self._drafter = drafter
        self._siblings, self._is_host = (drafter.siblings, False) if isinstance(drafter, MadeDrafts) else (0, True)
        self._depth = length.most  # of what was proposed last
        self._offer, self.lengths, self._vocab_size = offer, length, vocab_size
        self._waits, self._warned, self.failure = False, False, ""
        self._asked: dict[str, Request] = {}  # of a drafter of the host
        self._stopped: dict[str, Request] = {}

    @classmethod
    def of_host(cls, offer: Offer[DrafterSpec], registry: Registry, *, length: DraftLength, vocab_size: int) -> Drafting:
        """With the host's drafter on offer. Raises `PluginError` that names its plugin when that fails."""
        assert offer.spec.build is not None, "a drafter of the host is built"
        options = registry.options_for(offer.name)
        with inside(offer, "build the drafter"):
            drafter = checked(offer, offer.spec.build(DraftContext(vocab_size=vocab_size, options=options)), HostDrafter)
        return cls(drafter, offer, length=length, vocab_size=vocab_size, gives_trees=gives_trees(offer, options))

    def propose(self, table: RequestTable) -> dict[str, Sequence[int]]:
        """The guesses for those of the running requests that may be drafted, by id, without the empty ones, as many as pay.

        No step is in flight, unless `waits` asks: all tokens are known. A drafter of the host that fails is not asked again.
        """
        try:
            self._forget_ended(table)
            wanted = [(request, most) for request in table.running if request.num_left == 1 and (most := self._most(request)) > 0]
            if not wanted:
                return {}
            if isinstance(self._drafter, MadeDrafts):
                self._depth = self._drafter.depth
                return {key: tokens for key, tokens in self._drafter.of(wanted) if tokens}
            return self._paying(self._asked_of(self._drafter, wanted), table)
        except EnginError as error:  # no answer needs a guess
            self.failure, self._drafter, self._asked = str(error), MadeDrafts(), {}
            self.lengths.most = self.lengths.fixed = 0  # nor is anything captured for guesses
            _log.exception("the drafter %s guesses no more until a restart: %s", self._offer.name, error)
            return {}

    def _paying(self, found: Sequence[tuple[str, Sequence[int]]], table: RequestTable) -> dict[str, Sequence[int]]:
        most = self.lengths.paying([len(tokens) for _, tokens in found], sum(each.num_left == 1 for each in table.running))
        return {key: tokens[:most] for key, tokens in found if most and tokens}

    def waits(self, table: RequestTable) -> bool:
        """As `schedule.scheduler.Drafts` says: what it verifies is asked for anew then."""
        self._waits = self._is_host and bool(self.propose(table))
        return self._waits

    def _asked_of(self, drafter: HostDrafter, wanted: Sequence[tuple[Request, int]]) -> list[tuple[str, Sequence[int]]]:
        self._asked |= {request.request_id: request for request, _ in wanted}
        asks = [DraftAsk(each.request_id, AskedTokens(each.token_ids), most, each.asked.cache_salt) for each, most in wanted]
        with inside(self._offer, "propose tokens"):
            told = drafter.propose(asks)
            if not isinstance(told, Sized) or len(told) != len(asks):
                needed = f"a sequence of tokens for each of {len(asks)} requests"
                raise PluginError(f"{self._offer.source}: propose returned {told!r:.100}, and must return {needed}")
            return [(ask.key, self._valid(tokens, ask.most)) for ask, tokens in zip(asks, told, strict=True)]

    def coming(self, requests: Sequence[Request], num_made: int) -> Sequence[int] | None:
        """As `schedule.scheduler.Drafts` says. Nobody's where the host reads them, or where they branch."""
        if not self._on_device or self._siblings or any(request.adjusts or request.grammar is not None for request in requests):
            return None
        return [num_made if request.asked.params.speculation else 0 for request in requests]

    def length(self, requests: Sequence[Request], num_coming: int, num_tokens: int = 0) -> int:
        """How many tokens a draft model guesses at the end of a step of these requests, as many as pay with so many to come.

        No trial begins with many tokens of prompts, as it is over after few steps and they would all be followed for it. 0 where it
        has followed none of them well: it would guess badly, and nothing could be learnt from that.
        """
        if self._is_host:
            return 0
        if (lengths := self.lengths).fixed is not None:
            return lengths.of(sum(each.num_left == 1 for each in requests))
        length = lengths.of(num_coming) if num_tokens <= _MOST_TOKENS_OF_A_TRIAL else lengths.found(num_coming)
        return length if length and any(map(_is_followed, requests)) else 0

    def published(self, step: StepInput, requests: Sequence[Request], outputs: Sequence[RequestOutput]) -> None:
        """The step has been told: learn how often guesses are right, and how long such steps take."""
        if self.lengths.fixed is None and step.verifies:
            self._learn(requests, outputs)
        before, self._before = self._before, None
        if step.num_decode == step.num_items:
            self._before = now = _Published(step.num_items, step.decode_len - 1, step.draft_len, self._clock(), self._waits)
            self._waits = False
            if before is not None and self.lengths.fixed is None:
                self._time(before, now, outputs)

    def _time(self, before: _Published, now: _Published, outputs: Sequence[RequestOutput]) -> None:
        count, seconds = now.num_requests, now.at_s - before.at_s
        if not self._is_host:
            self.lengths.passed(count, now.verified // (1 + self._siblings), now.made, seconds)
            if before[:3] == now[:3] and now.verified == num_verified(now.made, self._siblings):
                self.lengths.took(count, now.made, seconds)
        elif before.num_requests == count and not now.waited_for:  # on a CPU that one had run before the one before it was told
            told = sum(len(output.token_ids) for output in outputs) / count
            self.lengths.verified(count, now.verified, seconds, told=told, late=before.waited_for or before.verified > 0)

    def _learn(self, requests: Sequence[Request], outputs: Sequence[RequestOutput]) -> None:
        followed = {request.request_id for request in requests if self._is_host or _is_followed(request)}
        verified = (output for output in outputs if output.num_drafted and output.request_id in followed)
        self.lengths.told((min(output.num_drafted, self._depth), output.num_accepted) for output in verified)

    def stop(self, requests: Iterable[Request]) -> None:
        """Guess no more of these: their grammars cannot be asked about tokens that may not come."""
        self._stopped |= {request.request_id: request for request in requests}

    def _most(self, request: Request) -> int:
        """How many guesses one that decodes may have; 0 or less: it wants none, has no room, or its grammar cannot go back."""
        asked, grammar = request.asked, request.grammar
        is_stuck = grammar is not None and not isinstance(grammar, RevocableGrammarState)
        if not asked.params.speculation or asked.embed or is_stuck or self._stopped.get(asked.request_id) is request:
            return 0
        return min(num_verified(self.lengths.most, self._siblings), request.limit - len(request.token_ids) - 1)

    def _valid(self, given: Sequence[int], most: int) -> Sequence[int]:
        """Up to the first that is no token: it is warned of once. Raises `PluginError` for no integers, and a tree not promised."""
        try:
            tokens = given[:most]
            found = list(takewhile(lambda token: 0 <= token < self._vocab_size, map(index, tokens)))
        except TypeError as error:
            needed = "a sequence of integers, the ids of tokens"
            raise PluginError(f"{self._offer.source}: propose returned {given!r:.100} for a request, not {needed}") from error
        if len(found) < len(tokens) and not self._warned:
            self._warned = True
            what = "%s guessed token %d of a vocabulary of %d; a guess ends before such a one, which is said this once"
            _log.warning(what, self._offer.source, tokens[len(found)], self._vocab_size)
        if not isinstance(tokens, DraftTree):
            return found
        if not self._gives_trees:
            raise PluginError(f"{self._offer.source}: propose gave a DraftTree, and `trees` of its DrafterSpec does not say so")
        tree = DraftTree(tuple(found), tokens.parents[: len(found)])
        return found if tree.is_chain else tree

    def _forget_ended(self, table: RequestTable) -> None:
        """Those that are there no more, or whose ids are another's by now."""
        self._stopped = {key: request for key, request in self._stopped.items() if table.by_id.get(key) is request}
        for key in [key for key, request in self._asked.items() if table.by_id.get(key) is not request]:
            del self._asked[key]
            assert not isinstance(self._drafter, MadeDrafts), "it is not asked"
            with inside(self._offer, "forget a request"):
                self._drafter.forget(key)


def _is_followed(request: Request) -> bool:
    """Whether a draft model that is asked about it has run over most of its tokens, the coming ones among them."""
    return request.asked.params.speculation and request.num_unfollowed <= _MOST_UNFOLLOWED * request.num_computed
