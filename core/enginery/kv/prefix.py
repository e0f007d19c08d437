"""The prefix cache: which pages hold the keys and values of which token prefixes.

A radix tree over whole pages with compressed edges. An edge holds its tokens as the bytes of an int32 array, so that comparing,
slicing and hashing 32k tokens are a few memory operations, whatever the page size:

    root ── "You are a helpful assistant ..." ──┬── "What is ..."   leaf: evicted from its end, oldest first
            pages 0 1 2 (locked by 1 request)   └── "Who was ..."   leaf, locked: in use

Where a model has memory of other kinds too, a sequence can only go on at a node with a resume point (`resume.py`). A split
leaves it below, trimming an edge drops it.

The cache owns the pages in the tree. A request that uses some of them holds a lock on the node where its prefix ends, which locks
the path up to the root. What is not locked can be evicted. A request that is computing more of its prompt announces its next page,
so that others can wait for it instead of computing it too.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

from enginery.kv.pages import PageAllocator
from enginery.kv.resume import ResumePoint, ResumePoints

TOKEN_TYPECODE = "i"
TOKEN_BYTES = array(TOKEN_TYPECODE).itemsize


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One edge and the node at its end; opaque outside of this module. `branch` is its key among the parent's children."""

    parent: PrefixNode | None
    branch: bytes
    tokens: bytes
    pages: list[int]
    children: dict[bytes, PrefixNode] = field(default_factory=dict)
    num_locks: int = 0
    last_used: int = 0
    point: ResumePoint | None = None

    def split(self, num_pages: int, page_bytes: int) -> PrefixNode:
        """Put a new node after the first `num_pages` of the edge. This one stays the lower part: locks on it keep their meaning."""
        assert self.parent is not None
        cut = num_pages * page_bytes
        upper = PrefixNode(self.parent, self.branch, self.tokens[:cut], self.pages[:num_pages])
        upper.num_locks, upper.last_used = self.num_locks, self.last_used
        self.parent.children[self.branch] = upper
        self.parent, self.branch = upper, self.tokens[cut : cut + page_bytes]
        self.tokens, self.pages = self.tokens[cut:], self.pages[num_pages:]
        upper.children[self.branch] = self
        return upper

    def deepest_point(self) -> ResumePoint | None:
        node: PrefixNode | None = self
        while node is not None:
            if node.point is not None and not node.point.is_dropped:
                return node.point
            node = node.parent
        return None


Announcement = tuple[PrefixNode, bytes]


class CachedPrefix(NamedTuple):
    """The longest cached prefix of some tokens. Valid until the next eviction, unless its node is locked before.

    next_announced: whether somebody is just computing the page after it. point: the last resume point on the way to its node.
    """

    node: PrefixNode
    pages: list[int]
    next_announced: bool
    point: ResumePoint | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it was evicted: its nodes are in the tree and, as they never get any, have all of its pages."""
        node, count = self.node, 0
        while node.parent is not None:
            if node.parent.children.get(node.branch) is not node:
                return False
            node, count = node.parent, count + len(node.pages)
        return count == len(self.pages)


class Inserted(NamedTuple):
    """What became of inserted pages. `duplicates` stay the caller's: the tree has other pages with the same content.

    The rest belong to the cache now, or did before. `node` is where the inserted prefix ends, not locked yet.
    """

    node: PrefixNode
    duplicates: list[int]


class PrefixWatcher(Protocol):
    """Is told what comes into a tree and what goes, in that order."""

    def stored(self, parent: int | None, tokens: bytes, pages: Sequence[int], salt: str) -> None:
        """These pages, one behind the other, follow page `parent`; None: they begin a prefix. tokens: of all of them."""

    def removed(self, pages: Sequence[int]) -> None: ...

    def resumable(self, point: ResumePoint, tokens: bytes, pages: Sequence[int], salt: str) -> None:
        """Sequences can go on from `point`, behind these tokens and the tree's pages of them, from the first on."""

    def given_up(self, point: ResumePoint) -> None:
        """They cannot any more, if they could."""


class RadixPrefixCache:
    """Prefixes of requests by their tokens, whole pages only. Requests share them only among equal salts."""

    def __init__(
        self, page_size: int, allocator: PageAllocator, points: ResumePoints | None = None, watcher: PrefixWatcher | None = None
    ) -> None:
        """points: None for a model whose memory is all of one kind, so that a sequence can go on behind any page."""
        self.points, self._allocator, self._watcher = points, allocator, watcher
        self.num_cached = self.num_evictable = self.num_evicted = 0
        self.root = PrefixNode(None, b"", b"", [])
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._announced: set[Announcement] = set()
        self._idle: OrderedDict[PrefixNode, None] = OrderedDict()  # unlocked leaves, the least recently used first
        self._ticks = count(1)

    def match(self, token_ids: array[int], salt: str, known: CachedPrefix | None = None) -> CachedPrefix:
        """The longest cached prefix that leaves at least one token to compute.

        known: what was found of them before. Where the tree still has all of that, only what follows is looked at.
        """
        begun = known if known is not None and known.is_whole else CachedPrefix(self.root, [], next_announced=False)
        first, num_pages = len(begun.pages), (len(token_ids) - 1) // self._page_size
        tokens = token_ids[first * self._page_size : min(num_pages, first + 1) * self._page_size].tobytes()
        if self._branch(begun.node, tokens, 0, salt) in begun.node.children:  # else there is no need for all of a long prompt
            tokens = token_ids[first * self._page_size : num_pages * self._page_size].tobytes()
        node, more = self._descend(tokens, salt, begun.node)
        next_announced = len(more) < num_pages - first and (node, self._branch(node, tokens, len(more), salt)) in self._announced
        pages = begun.pages + more if more else begun.pages
        return CachedPrefix(node, pages, next_announced, None if self.points is None else node.deepest_point())

    def lock(self, node: PrefixNode) -> None:
        """Keep the prefix that ends at `node` until `unlock`. Locks are counted."""
        self._idle.pop(node, None)
        while node.parent is not None:
            if node.num_locks == 0:
                self.num_evictable -= len(node.pages)
            node.num_locks += 1
            node = node.parent

    def unlock(self, node: PrefixNode) -> None:
        """Take one lock back; the prefix counts as used now."""
        now = next(self._ticks)
        if node.parent is not None and node.num_locks == 1 and not node.children:
            self._idle[node] = None
        while node.parent is not None:
            assert node.num_locks > 0, "a prefix was unlocked more often than locked"
            node.num_locks -= 1
            node.last_used = now
            if node.num_locks == 0:
                self.num_evictable += len(node.pages)
            node = node.parent

    def insert(self, token_ids: array[int], pages: list[int], salt: str) -> Inserted:
        """Give `pages`, which hold the first `len(pages) * page_size` of `token_ids`, to the cache."""
        tokens = token_ids[: len(pages) * self._page_size].tobytes()
        node, found = self._descend(tokens, salt)
        shared = len(found)
        if shared < len(pages):
            self._idle.pop(node, None)
            branch, new = self._branch(node, tokens, shared, salt), tokens[shared * self._page_bytes :]
            if self._watcher is not None:
                self._watcher.stored(node.pages[-1] if shared else None, new, pages[shared:], salt)
            leaf = node.children[branch] = PrefixNode(node, branch, new, pages[shared:], last_used=next(self._ticks))
            self._idle[leaf], node = None, leaf
            self.num_cached += len(leaf.pages)
            self.num_evictable += len(leaf.pages)
        if pages[:shared] == found:
            return Inserted(node, [])
        return Inserted(node, [mine for mine, cached in zip(pages, found, strict=False) if mine != cached])

    def attach(self, point: ResumePoint, token_ids: array[int], salt: str) -> bool:
        """Let sequences go on from `point`, which is given up where there is one already. False: its prefix is not in the tree."""
        assert self.points is not None, "a tree without resume points is given one"
        tokens = token_ids[: point.position].tobytes()
        node, found = self._descend(tokens, salt)
        if len(found) * self._page_bytes < len(tokens):
            return False
        if node.point is None or node.point.is_dropped:
            node.point = point
            if self._watcher is not None:
                self._watcher.resumable(point, tokens, found, salt)
            return True
        if node.point.passing and not point.passing:
            self.points.keep(node.point)
        if node.point is not point:
            self.points.drop(point)
        return True

    def announce(self, node: PrefixNode, token_ids: array[int], page: int, salt: str) -> Announcement:
        """Say that page number `page` of these tokens is being computed. `node`, where the prefix before it ends, is locked."""
        tokens = token_ids[page * self._page_size : (page + 1) * self._page_size].tobytes()
        announcement = node, self._branch(node, tokens, 0, salt)
        self._announced.add(announcement)
        return announcement

    def withdraw(self, announcement: Announcement) -> None:
        """It is computed, or will not be."""
        self._announced.discard(announcement)

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages, from the ends of the least recently used prefixes. Returns how many there were."""
        wanted = num_pages
        while wanted > 0 and self._idle:
            node = next(iter(self._idle))
            if self.points is not None and node.point is not None:
                self.points.drop(node.point)
                node.point = None
            freed = node.pages[-wanted:]
            del node.pages[-wanted:]
            if node.pages:
                node.tokens = node.tokens[: len(node.pages) * self._page_bytes]
            else:
                self._remove(node)
            wanted -= len(freed)
            if self._watcher is not None:
                self._watcher.removed(freed)
            self._allocator.give_back(freed)
        freed_pages = num_pages - max(wanted, 0)
        self.num_cached -= freed_pages
        self.num_evictable -= freed_pages
        self.num_evicted += freed_pages
        return freed_pages

    def _branch(self, node: PrefixNode, tokens: bytes, page: int, salt: str) -> bytes:
        """The key of page number `page` among the children of `node`. The root's begin with the salt, which keeps salts apart."""
        branch = tokens[page * self._page_bytes : (page + 1) * self._page_bytes]
        return branch if node is not self.root else salt.encode() + branch

    def _descend(self, tokens: bytes, salt: str, begin: PrefixNode | None = None) -> tuple[PrefixNode, list[int]]:
        """Walk down from the root, or `begin`, as far as `tokens` go. An edge that is only partly matched is split where the match
        ends."""
        node, pages = begin or self.root, list[int]()
        while len(pages) * self._page_bytes < len(tokens):
            child = node.children.get(self._branch(node, tokens, len(pages), salt))
            if child is None:
                break
            shared = _num_shared_pages(child.tokens, tokens, len(pages) * self._page_bytes, page_bytes=self._page_bytes)
            node = child if shared == len(child.pages) else child.split(shared, self._page_bytes)
            pages += node.pages
        return node, pages

    def _remove(self, leaf: PrefixNode) -> None:
        """Drop an idle leaf. A parent that is idle now takes its place, or goes to the end if it was used since."""
        parent = leaf.parent
        assert parent is not None
        del self._idle[leaf], parent.children[leaf.branch]
        if parent is not self.root and not parent.children and parent.num_locks == 0:
            self._idle[parent] = None
            self._idle.move_to_end(parent, last=parent.last_used > leaf.last_used)


def _num_shared_pages(edge: bytes, tokens: bytes, start: int, *, page_bytes: int) -> int:
    """How many pages of `edge` agree with `tokens` from `start` on; the first is known to. Bisection, O(len(edge)) in all."""
    low, high = 1, min(len(edge), len(tokens) - start) // page_bytes
    probe = high
    while low < high:
        known, end = low * page_bytes, probe * page_bytes
        if edge[known:end] == tokens[start + known : start + end]:
            low = probe
        else:
            high = probe - 1
        probe = (low + high + 1) // 2
    return low


class NoPrefixCache(RadixPrefixCache):
    """`--no-prefix-cache`: matches nothing and keeps nothing; every inserted page is called a duplicate."""

    def __init__(self) -> None:
        super().__init__(1, PageAllocator(0))

    def match(self, token_ids: array[int], salt: str, known: CachedPrefix | None = None) -> CachedPrefix:
        return CachedPrefix(self.root, [], next_announced=False)

    def insert(self, token_ids: array[int], pages: list[int], salt: str) -> Inserted:
        return Inserted(self.root, pages)
