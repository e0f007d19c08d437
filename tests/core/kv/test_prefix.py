"""The prefix cache: its rules one by one, then random use against a plain dict of prefixes."""

from array import array
from time import thread_time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from integrity import check_tree, pages_of
from pairwise import examples

from enginery.kv.kinds import Demand
from enginery.kv.manager import KVCacheManager, SequenceKV
from enginery.kv.pages import PageAllocator
from enginery.kv.prefix import NoPrefixCache, RadixPrefixCache


def tokens_of(*token_ids):
    return array("i", token_ids)


def cache_of(*, page_size=2, num_pages=64):
    allocator = PageAllocator(num_pages)
    return RadixPrefixCache(page_size, allocator), allocator


def insert(cache, allocator, tokens, *, page_size=2, salt=""):
    pages = allocator.take(len(tokens) // page_size)
    return pages, cache.insert(tokens, pages, salt)


def test_a_prefix_is_found_in_whole_pages():
    cache, allocator = cache_of()
    pages, _ = insert(cache, allocator, tokens_of(1, 2, 3, 4, 5, 6))
    assert cache.match(tokens_of(1, 2, 3, 4, 5, 9, 9), "").pages == pages[:2]
    assert cache.match(tokens_of(1, 9, 3, 4), "").pages == []
    check_tree(cache)


def test_a_match_leaves_one_token_to_compute():
    cache, allocator = cache_of()
    pages, _ = insert(cache, allocator, tokens_of(1, 2, 3, 4))
    assert cache.match(tokens_of(1, 2, 3, 4), "").pages == pages[:1]
    assert cache.match(tokens_of(1, 2, 3, 4, 5), "").pages == pages
    assert cache.match(tokens_of(1), "").pages == []


def test_different_salts_share_nothing():
    cache, allocator = cache_of()
    ours, _ = insert(cache, allocator, tokens_of(1, 2, 3, 4), salt="ours")
    theirs, inserted = insert(cache, allocator, tokens_of(1, 2, 3, 4), salt="theirs")
    assert inserted.duplicates == []
    assert cache.match(tokens_of(1, 2, 3, 4, 5), "ours").pages == ours
    assert cache.match(tokens_of(1, 2, 3, 4, 5), "theirs").pages == theirs
    assert cache.match(tokens_of(1, 2, 3, 4, 5), "").pages == []


def test_pages_with_content_the_cache_has_already_stay_the_callers():
    cache, allocator = cache_of()
    first, _ = insert(cache, allocator, tokens_of(1, 2, 3, 4))
    second, inserted = insert(cache, allocator, tokens_of(1, 2, 3, 4, 5, 6))
    assert inserted.duplicates == second[:2]
    assert cache.match(tokens_of(1, 2, 3, 4, 5, 6, 7), "").pages == first + second[2:]
    check_tree(cache)


def test_inserting_the_caches_own_pages_again_makes_no_duplicates():
    cache, allocator = cache_of()
    pages, _ = insert(cache, allocator, tokens_of(1, 2, 3, 4))
    assert cache.insert(tokens_of(1, 2, 3, 4, 5, 6), [*pages, *allocator.take(1)], "").duplicates == []
    assert cache.num_cached == 3


def test_a_lock_keeps_the_whole_path_through_splits():
    cache, allocator = cache_of()
    pages, inserted = insert(cache, allocator, tokens_of(1, 2, 3, 4, 5, 6))
    cache.lock(inserted.node)
    _, other = insert(cache, allocator, tokens_of(1, 2, 9, 9))
    allocator.give_back(other.duplicates)
    assert cache.num_evictable == 1
    assert cache.evict(99) == 1
    check_tree(cache)
    assert cache.match(tokens_of(1, 2, 3, 4, 5, 6, 7), "").pages == pages
    cache.unlock(inserted.node)
    assert cache.evict(99) == 3
    assert allocator.num_free == allocator.num_pages


def test_a_lock_on_a_prefix_lets_what_follows_it_go():
    cache, allocator = cache_of()
    pages, _ = insert(cache, allocator, tokens_of(1, 2, 3, 4, 5, 6))
    cache.lock(cache.match(tokens_of(1, 2, 3, 4), "").node)
    assert cache.evict(99) == 2
    assert cache.match(tokens_of(1, 2, 3, 4, 5, 6, 7), "").pages == pages[:1]
    check_tree(cache)


def test_unlocking_more_often_than_locking_is_a_bug():
    cache, allocator = cache_of()
    _, inserted = insert(cache, allocator, tokens_of(1, 2))
    with pytest.raises(AssertionError, match="more often"):
        cache.unlock(inserted.node)


def test_the_least_recently_used_prefix_goes_first_and_from_its_end():
    cache, allocator = cache_of()
    old, inserted = insert(cache, allocator, tokens_of(1, 2, 3, 4))
    new, _ = insert(cache, allocator, tokens_of(5, 6, 7, 8))
    cache.lock(inserted.node)
    cache.unlock(inserted.node)
    assert cache.evict(1) == 1
    assert cache.match(tokens_of(5, 6, 7, 8, 0), "").pages == new[:1]
    assert cache.match(tokens_of(1, 2, 3, 4, 0), "").pages == old
    assert cache.evict(2) == 2
    assert cache.match(tokens_of(5, 6, 7, 8, 0), "").pages == []
    assert cache.match(tokens_of(1, 2, 3, 4, 0), "").pages == old[:1]


def test_a_shared_prefix_that_is_still_used_outlives_its_old_continuations():
    cache, allocator = cache_of()
    system, _ = insert(cache, allocator, tokens_of(1, 2))
    cache.insert(tokens_of(1, 2, 3, 4), [*system, *allocator.take(1)], "")
    insert(cache, allocator, tokens_of(7, 8))
    node = cache.match(tokens_of(1, 2, 9), "").node
    cache.lock(node)
    cache.unlock(node)
    assert cache.evict(2) == 2
    assert cache.match(tokens_of(1, 2, 9), "").pages == system


def test_a_shared_prefix_that_nobody_used_since_goes_with_its_continuations():
    cache, allocator = cache_of()
    system, _ = insert(cache, allocator, tokens_of(1, 2))
    cache.insert(tokens_of(1, 2, 3, 4), [*system, *allocator.take(1)], "")
    other, _ = insert(cache, allocator, tokens_of(7, 8))
    assert cache.evict(2) == 2
    assert cache.match(tokens_of(7, 8, 9), "").pages == other


def test_an_announced_page_is_reported_until_it_is_withdrawn():
    cache, allocator = cache_of()
    _, inserted = insert(cache, allocator, tokens_of(1, 2))
    cache.lock(inserted.node)
    announcement = cache.announce(inserted.node, tokens_of(1, 2, 3, 4), 1, "")
    check_tree(cache)
    assert cache.match(tokens_of(1, 2, 3, 4, 5), "").next_announced
    assert not cache.match(tokens_of(1, 2, 3, 4), "").next_announced  # page 1 would leave no token to compute
    assert not cache.match(tokens_of(1, 2, 3, 5, 6), "").next_announced
    assert not cache.match(tokens_of(3, 4, 5), "").next_announced
    cache.withdraw(announcement)
    assert not cache.match(tokens_of(1, 2, 3, 4, 5), "").next_announced


def test_a_cache_that_is_off_finds_nothing_and_keeps_nothing():
    cache = NoPrefixCache()
    tokens = tokens_of(1, 2, 3)
    node, pages, next_announced, _ = cache.match(tokens, "")
    cache.lock(node)
    cache.withdraw(cache.announce(node, tokens, 0, ""))
    assert cache.insert(tokens, [7], "").duplicates == [7]
    cache.unlock(node)
    check_tree(cache)
    assert (pages, next_announced, cache.evict(1), cache.num_cached, pages_of(cache)) == ([], False, 0, 0, [])


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prompt_of_32k_tokens_takes_less_than_a_second(page_size):
    cache, allocator = cache_of(page_size=page_size, num_pages=4 * 32768 // page_size)
    tokens = array("i", range(32768))
    insert(cache, allocator, tokens, page_size=page_size)
    times = []
    for meets in (20000, 16000, 12000):
        other = array("i", [*range(meets), *range(7, 32775 - meets)])
        started = thread_time()
        cache.match(other, "")
        _, inserted = insert(cache, allocator, other, page_size=page_size)
        cache.lock(inserted.node)
        cache.unlock(inserted.node)
        times.append(thread_time() - started)
        allocator.give_back(inserted.duplicates)
    assert min(times) < 0.4  # where the square of the length counts, minutes
    check_tree(cache)


class Read(array):
    """Counts the tokens that are taken out of it."""

    count = 0

    def __getitem__(self, at):
        taken = super().__getitem__(at)
        Read.count += len(taken) if isinstance(at, slice) else 1
        return taken


@pytest.mark.parametrize("num_cached", [0, 300, 4000])
def test_who_waits_is_not_looked_for_again_where_nothing_of_it_went(num_cached):
    cache, allocator = cache_of(num_pages=5000)
    manager = KVCacheManager(2, cache, allocator, seats=range(2))
    tokens = Read("i", range(1, 8001))
    insert(cache, allocator, tokens[:num_cached])
    waits = SequenceKV(token_ids=tokens, salt="")

    def is_refused():
        Read.count = 0
        return not manager.enter(waits, reuse=True, reserved=Demand(4500))

    assert is_refused()
    for _ in range(3):
        insert(cache, allocator, tokens_of(-1, -2, allocator.num_free, -4))
        assert is_refused()
        assert Read.count <= 4
    cache.evict(cache.num_evictable // 2)
    assert is_refused()
    found = cache.match(tokens, "")
    _, inserted = insert(cache, allocator, tokens[: 2 * len(found.pages) + 20])
    allocator.give_back(inserted.duplicates)
    found = cache.match(tokens, "")
    assert manager.enter(waits, reuse=True, reserved=Demand(0))
    assert waits.pages.tolist() == found.pages
    assert len(found.pages) >= 10


class PrefixCacheMachine(RuleBasedStateMachine):
    """Random use; the model is a dict from (salt, whole-page prefix) to the page that holds its last `page_size` tokens.

    Eviction may forget, but only what is not locked; it may never answer with a page of other content.
    """

    @initialize(page_size=st.sampled_from([1, 4, 16]))
    def build(self, page_size):
        self.page_size = page_size
        self.allocator = PageAllocator(40)
        self.cache = RadixPrefixCache(page_size, self.allocator)
        self.model = {}
        self.locks = []
        self.found = {}  # by salt and tokens

    def draw_tokens(self, data):
        """Few different pages, so that prefixes meet."""
        kinds = data.draw(st.lists(st.integers(0, 2), max_size=8))
        return array("i", [kind * 100 + offset for kind in kinds for offset in range(self.page_size)])

    def prefixes(self, tokens, salt):
        return [(salt, tokens[:end].tobytes()) for end in range(self.page_size, len(tokens) + 1, self.page_size)]

    def forget_evicted(self):
        cached = set(pages_of(self.cache))
        gone = {key for key, page in self.model.items() if page not in cached}
        assert not gone & {key for _, keys in self.locks for key in keys}, "a locked page was evicted"
        for key in gone:
            del self.model[key]

    @rule(data=st.data(), salt=st.sampled_from(["", "a", "b"]), extra=st.integers(0, 3), lock=st.booleans())
    def match(self, data, salt, extra, lock):
        tokens = self.draw_tokens(data) + array("i", [999] * extra)
        if not tokens:
            return
        keys = self.prefixes(tokens[: (len(tokens) - 1) // self.page_size * self.page_size], salt)
        expected = []
        for key in keys:
            if key not in self.model:
                break
            expected.append(self.model[key])
        key = salt, tokens.tobytes()
        found = self.found[key] = self.cache.match(tokens, salt, self.found.get(key))
        assert found.pages == expected
        if lock:
            self.cache.lock(found.node)
            self.locks.append((found.node, keys[: len(expected)]))

    @rule(data=st.data(), salt=st.sampled_from(["", "a", "b"]), lock=st.booleans())
    def insert(self, data, salt, lock):
        tokens = self.draw_tokens(data)
        num_pages = len(tokens) // self.page_size
        if num_pages > self.allocator.num_free:
            return
        pages = self.allocator.take(num_pages)
        keys = self.prefixes(tokens, salt)
        duplicates = [page for key, page in zip(keys, pages, strict=True) if key in self.model]
        inserted = self.cache.insert(tokens, pages, salt)
        assert inserted.duplicates == duplicates
        self.allocator.give_back(duplicates)
        for key, page in zip(keys, pages, strict=True):
            self.model.setdefault(key, page)
        if lock:
            self.cache.lock(inserted.node)
            self.locks.append((inserted.node, keys))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data):
        node, _ = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.cache.unlock(node)

    @rule(num_pages=st.integers(0, 12))
    def evict(self, num_pages):
        evictable = self.cache.num_evictable
        assert self.cache.evict(num_pages) == min(num_pages, evictable)
        self.forget_evicted()

    @invariant()
    def it_is_sound(self):
        check_tree(self.cache)
        assert sorted(pages_of(self.cache)) == sorted(self.model.values())
        assert self.allocator.num_free + self.cache.num_cached == self.allocator.num_pages
        locked = {key for _, keys in self.locks for key in keys}
        assert self.cache.num_cached - self.cache.num_evictable == len(locked)


PrefixCacheMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
test_random_use_agrees_with_a_dict_of_prefixes = PrefixCacheMachine.TestCase
