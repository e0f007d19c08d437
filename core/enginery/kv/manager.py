"""Pages of the sequences that run: taken as their tokens are scheduled, shared through the prefix cache, given back."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from enginery.kv.finite import FiniteMemory
from enginery.kv.kinds import Demand, StatePages, WindowPages
from enginery.kv.pages import PageAllocator
from enginery.kv.prefix import Announcement, CachedPrefix, PrefixNode, RadixPrefixCache
from enginery.kv.resume import ResumePoint


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceKV:
    """What one sequence of tokens has in KV memory. The manager alone changes it, but for `num_written`.

    token_ids: [num_tokens] int32, the request's own array, which grows; never written here. salt: prefixes are shared among equal
    ones. pages: int32, of the kind `full`, in the order of the tokens; the first `num_locked` of them, on the path to `node`,
    belong to the prefix cache and are locked. num_shared: tokens whose pages it found there; where they are computed again, they
    are not written again. num_told: how many pages the workers have been told. announced: the page that it computes next, for which
    others wait. num_written: tokens that completed steps have computed, or that it found in the cache and need not compute. ready:
    items of one token that begin before it need no new page and no decision. seat: its number among the running sequences;
    meaningless while it has no pages. found: while it waits, its prefix as it was found last.

    window, states: its pages of these kinds. marks: where resume points are to be made of its prompt, in order. points: those that
    were made and are not in the tree, by their positions. superseded: those that count for less once it leaves one further along.
    """

    token_ids: array[int]
    salt: str
    pages: array[int] = field(default_factory=lambda: array("i"))
    node: PrefixNode | None = None
    announced: Announcement | None = None
    num_locked: int = 0
    num_shared: int = 0
    num_told: int = 0
    num_written: int = 0
    ready: int = 0
    seat: int = -1
    found: CachedPrefix | None = None
    window: WindowPages = field(default_factory=WindowPages)
    states: StatePages = field(default_factory=StatePages)
    marks: list[int] = field(default_factory=list)
    points: list[ResumePoint] = field(default_factory=list)
    superseded: list[ResumePoint] = field(default_factory=list)


class KVCacheManager:
    """Moves sequences in and out of KV memory. It knows token ids, pages and salts, and no requests.

    The slot of a token: `pages[position // page_size] * page_size + position % page_size`. released: seats that were given back
    since the workers were told; whoever tells them clears it. seats: those that it may give. finite: memory of the kinds beside
    `full`; None: the model has none.
    """

    def __init__(
        self, page_size: int, cache: RadixPrefixCache, allocator: PageAllocator, *, seats: range, finite: FiniteMemory | None = None
    ) -> None:
        self.page_size, self.cache, self.allocator = page_size, cache, allocator
        self.finite = finite or FiniteMemory(page_size, cache)
        self.seats = seats
        self.free_seats = list(reversed(seats))
        self.released: list[int] = []

    @property
    def available(self) -> Demand:
        """Pages of each kind that are free, or that the prefix cache can give up."""
        return self.finite.available._replace(full=self.num_available)

    @property
    def num_available(self) -> int:
        """Those of the kind `full`."""
        return self.allocator.num_free + self.cache.num_evictable

    def demand(self, kv: SequenceKV, num_tokens: int) -> Demand:
        """Pages of each kind that it lacks to come to `num_tokens` tokens; negative if it has more."""
        return self.finite.demand(kv, num_tokens)._replace(full=-(-num_tokens // self.page_size) - len(kv.pages))

    def room(self, kv: SequenceKV) -> int:
        """Tokens it could hold in all without preempting another sequence."""
        return min((self.num_available + len(kv.pages)) * self.page_size, self.finite.room(kv))

    def missing(self, kv: SequenceKV, start: int, stop: int) -> Demand:
        """Pages of each kind that its next item, `start` to `stop`, lacks, after what is out of its reach has been given back."""
        self.finite.forget(kv, start)
        return self.finite.missing(kv, stop)._replace(full=-(-stop // self.page_size) - len(kv.pages))

    def enter(self, kv: SequenceKV, *, reuse: bool, reserved: Demand) -> bool:
        """Give it a seat and its cached prefix, if the pages for all its other tokens are there besides `reserved`.

        reuse: whether to look for the prefix; without it, every token is computed. Returns False, changing nothing, if there are
        too few pages or no seat, or if its next page is just being computed for another sequence: then it waits for that one.
        Afterwards `kv.num_written` tokens are in the cache already, and it goes on from there.
        """
        if not self.free_seats:
            return False
        found = CachedPrefix(self.cache.root, [], next_announced=False)
        if reuse:
            found = kv.found = self.cache.match(kv.token_ids, kv.salt, kv.found)
            if found.next_announced:
                return False
        self.cache.lock(found.node)
        self.finite.resume(kv, found.point)
        demand = self.demand(kv, len(kv.token_ids))
        if not demand._replace(full=demand.full - len(found.pages)).plus(reserved).fits(self.available):
            self.finite.let_go(kv)
            self.cache.unlock(found.node)
            return False
        kv.node, kv.pages, kv.num_locked, kv.found = found.node, array("i", found.pages), len(found.pages), None
        kv.seat = self.free_seats.pop()
        num_matched = kv.num_shared = len(found.pages) * self.page_size
        kv.num_written = kv.ready = num_matched
        if self.finite.allocators:
            kv.num_written = kv.ready = 0 if found.point is None else found.point.position
            self.finite.begin(kv, found.point, num_matched=num_matched)
        self._announce(kv)
        return True

    def prepare(self, kv: SequenceKV, start: int, stop: int, *, num_known: int) -> None:
        """Take the pages for its next item, evicting cached ones if it must. They must be available.

        num_known: tokens that it has, known or sampled by steps in flight.
        """
        lacking = -(-stop // self.page_size) - len(kv.pages)
        if lacking > 0:
            if lacking > self.allocator.num_free:
                self.cache.evict(lacking - self.allocator.num_free)
            kv.pages.extend(self.allocator.take(lacking))
        kv.ready = len(kv.pages) * self.page_size
        if self.finite.allocators:
            self.finite.prepare(kv, start, stop, num_known=num_known)
            kv.ready = min(kv.ready, self.finite.prepared_until(stop))

    def share(self, kv: SequenceKV) -> None:
        """Put its written pages into the prefix cache while it goes on using them.

        Not if the cache has some of the content in other pages: it would have to lock both, and its own are in use.
        """
        self._withdraw(kv)
        num_pages = self._num_full(kv)
        known = self.cache.match(kv.token_ids[: num_pages * self.page_size + 1], kv.salt).pages
        if known == kv.pages[: len(known)].tolist():
            self._insert(kv)
            self._announce(kv)
        if kv.points:
            self.finite.points.settle(kv)

    def leave(self, kv: SequenceKV) -> None:
        """Leave what is written to the cache and free the rest, its seat too. No step may be in flight that writes to its pages."""
        self._withdraw(kv)
        duplicates = self._insert(kv)
        self.finite.points.leave(kv)
        self.finite.let_go(kv)
        self.allocator.give_back(duplicates + kv.pages[self._num_full(kv) :].tolist())
        self.free_seats.append(kv.seat)
        self.released.append(kv.seat)
        self._let_go(kv)

    def _num_full(self, kv: SequenceKV) -> int:
        """Its pages that are written wholly."""
        return max(kv.num_written // self.page_size, kv.num_locked)

    def _insert(self, kv: SequenceKV) -> list[int]:
        """Cache its whole written pages and lock them. Returns those that the cache did not want."""
        num_pages = self._num_full(kv)
        inserted = self.cache.insert(kv.token_ids, kv.pages[:num_pages].tolist(), kv.salt)
        assert kv.node is not None
        self.cache.lock(inserted.node)
        self.cache.unlock(kv.node)
        kv.node = inserted.node
        if inserted.node is not self.cache.root:
            kv.num_locked = num_pages
        return inserted.duplicates

    def _announce(self, kv: SequenceKV) -> None:
        """Tell the others which page of its prompt comes next, if it is a whole one."""
        page = self._num_full(kv)
        if kv.num_written < len(kv.token_ids) - 1 and (page + 1) * self.page_size <= len(kv.token_ids):
            assert kv.node is not None
            kv.announced = self.cache.announce(kv.node, kv.token_ids, page, kv.salt)

    def _withdraw(self, kv: SequenceKV) -> None:
        if kv.announced is not None:
            self.cache.withdraw(kv.announced)
            kv.announced = None

    def _let_go(self, kv: SequenceKV) -> None:
        assert kv.node is not None
        self.cache.unlock(kv.node)
        kv.node, kv.pages = None, array("i")
        kv.num_locked = kv.num_shared = kv.num_written = kv.num_told = kv.ready = 0
