"""Invariants of who owns which page: of allocators, resume points, the prefix tree, sequences and requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

from enginery.contracts.batch import STATE, WINDOW, MemoryKind
from enginery.kv.finite import FiniteMemory
from enginery.kv.manager import SequenceKV
from enginery.kv.pages import PageAllocator
from enginery.kv.prefix import PrefixNode, RadixPrefixCache
from enginery.kv.resume import ResumePoints
from enginery.schedule.queue import WaitingQueue
from enginery.schedule.scheduler import Scheduler
from enginery.schedule.table import RequestTable


def check_allocator(allocator: PageAllocator) -> None:
    """Counters and owners agree."""
    taken = [page for page in range(allocator.num_pages) if allocator.is_taken(page)]
    assert sorted([*allocator._free, *taken]) == list(range(allocator.num_pages)), "a page is both free and taken, or neither"
    cached = [page for page in taken if allocator._shares[page]]
    assert len(cached) == allocator.num_cached, f"{len(cached)} pages are cached, {allocator.num_cached} counted"
    idle = sum(not allocator.users(page) for page in cached)
    assert idle == allocator.num_idle, f"{idle} pages are the cache's alone, {allocator.num_idle} counted"


def check_points(points: ResumePoints) -> None:
    """The shares in every page are those of the points that are here."""
    for kind, allocator in points.allocators.items():
        shares = Counter(page for point in points for page in point.pages[kind])
        counted = Counter({page: allocator._shares[page] for page in range(allocator.num_pages)})
        assert shares == counted, f"shares in {kind} pages are wrong"
        check_allocator(allocator)
    assert not any(point.is_dropped for point in points), "a point that was given up is still in order"


def descendants(node: PrefixNode) -> Iterator[PrefixNode]:
    """All nodes below one."""
    stack = list(node.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


def pages_of(cache: RadixPrefixCache) -> list[int]:
    """Those in the tree."""
    return [page for node in descendants(cache.root) for page in node.pages]


def prefix_pages(node: PrefixNode) -> list[int]:
    """Those on the way from the root."""
    return node.pages if node.parent is None else prefix_pages(node.parent) + node.pages


def check_tree(cache: RadixPrefixCache) -> None:
    """Tree, counters and the order of eviction agree."""
    nodes, pages = list(descendants(cache.root)), pages_of(cache)
    assert len(set(pages)) == len(pages), "a page is in the tree twice"
    assert all(cache._allocator.is_taken(page) for page in pages), "a page of the tree is free"
    assert len(pages) == cache.num_cached, f"{len(pages)} pages in the tree, {cache.num_cached} counted"
    unlocked = sum(len(node.pages) for node in nodes if node.num_locks == 0)
    assert unlocked == cache.num_evictable, f"{unlocked} unlocked pages, {cache.num_evictable} counted"
    assert set(cache._idle) == {node for node in nodes if not node.children and node.num_locks == 0}, "idle leaves are wrong"
    assert all(node.num_locks or node is cache.root for node, _ in cache._announced), "announced after a prefix that may go"
    if cache.points is not None:
        check_points(cache.points)
    for node in nodes:
        length = len(prefix_pages(node)) * cache._page_size
        assert node.point is None or node.point.is_dropped or node.point.position == length, "a point is at another's node"
        assert node.pages, "an edge without pages"
        assert len(node.tokens) == len(node.pages) * cache._page_bytes, "an edge with another number of tokens than of pages"
        assert node.num_locks >= sum(child.num_locks for child in node.children.values()), "a lock does not reach the root"
        assert node.parent is not None
        assert node.parent.children[node.branch] is node, "a node is not its parent's child"


def check_finite(finite: FiniteMemory, resident: list[SequenceKV]) -> None:
    """The users of every page are the sequences that have it."""
    owned: dict[MemoryKind, list[int]] = {
        WINDOW: [page for kv in resident for page in kv.window.pages],
        STATE: [*finite.read, *(page for kv in resident for page in kv.states.owned())],
    }
    for kind, allocator in finite.allocators.items():
        found = [0] * allocator.num_pages
        for page in owned[kind]:
            found[page] += 1
        assert found == [allocator.users(page) for page in range(allocator.num_pages)], f"users of {kind} pages are wrong"
        check_allocator(allocator)


def check_queue(waiting: WaitingQueue) -> None:
    """The requests stand in order and their tokens are counted."""
    requests = waiting._requests
    assert requests == sorted(requests, key=attrgetter("order")), "the waiting requests are out of order"
    assert waiting.num_tokens == sum(request.num_expected for request in requests), "waiting tokens are miscounted"


def check_table(table: RequestTable) -> None:
    """Every page has one owner: a request, the cache, or nobody."""
    cache, allocator = table.kv.cache, table.kv.allocator
    check_tree(cache)
    cached = set(pages_of(cache))
    resident = {*table.running, *table.leaving}
    owned = [page for request in resident for page in request.kv.pages if page not in cached]
    assert len(set(owned)) == len(owned), "two requests own one page"
    check_finite(table.kv.finite, [request.kv for request in resident])
    seats = [*table.kv.free_seats, *(request.kv.seat for request in resident)]
    assert sorted(seats) == list(table.kv.seats), "two requests own one state, or nobody does"
    assert all(allocator.is_taken(page) for page in owned), "a request's page is free"
    assert len(owned) + len(cached) + allocator.num_free == allocator.num_pages, "a page has no owner and is not free"
    for request in resident:
        assert request.kv.node is not None
        locked = prefix_pages(request.kv.node)
        assert locked == request.kv.pages[: len(locked)].tolist(), "a request has pages locked that are not its own"
        assert not cached.intersection(request.kv.pages[len(locked) :]), "a request uses cached pages that it has not locked"
    check_queue(table.waiting)
    assert table.running == sorted(table.running, key=attrgetter("order")), "the running requests are out of order"
    assert {*table.side_by_side} == {*table.running}, "a running request stands nowhere"
    assert len(table.side_by_side) == len(table.running), "a running request stands in two places"
    assert set(table.by_id.values()) >= {*table.running}, "a running request is unknown"
    table.check_idle()


def check_scheduler(scheduler: Scheduler) -> None:
    """Of everything that it owns."""
    check_table(scheduler.table)
