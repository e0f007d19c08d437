"""Counted owners and resume points, one rule at a time, then random use against plain counts."""

from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import check_allocator, check_tree
from pairwise import examples

from enginery.contracts.batch import STATE
from enginery.kv.kinds import WindowKind, WindowPages, most_window_pages, reach_of
from enginery.kv.pages import PageAllocator
from enginery.kv.prefix import RadixPrefixCache
from enginery.kv.resume import ResumePoints


def cache_of(*, num_states=8, page_size=2):
    allocator, states = PageAllocator(64), PageAllocator(num_states)
    return RadixPrefixCache(page_size, allocator, ResumePoints({STATE: states})), allocator, states


def insert(cache, allocator, *token_ids):
    tokens = array("i", token_ids)
    inserted = cache.insert(tokens, allocator.take(len(tokens) // 2), "")
    allocator.give_back(inserted.duplicates)
    return tokens


def point_at(cache, states, position, tokens, **how):
    """A point whose state only the tree has."""
    pages = states.take(1)
    point = cache.points.make(position, {STATE: tuple(pages)}, **how)
    states.give_back(pages)
    return point, cache.attach(point, tokens, "")


def test_to_give_up_one_of_many_points_looks_at_no_more():
    class Counted(ResumePoints):
        num_seen = 0

        def __iter__(self):
            for point in super().__iter__():
                self.num_seen += 1
                yield point

    states = PageAllocator(1000)
    points = Counted({STATE: states})
    for position in range(1000):
        (page,) = states.take(1)
        points.make(position, {STATE: (page,)})
        if position:
            states.give_back([page])  # the first one's is in use
    points.evict(STATE, 3)
    assert (states.num_free, points.num_evicted[STATE]) == (3, 3)
    assert points.num_seen <= 6
    assert len(list(points)) == 997


def test_a_page_is_free_when_its_last_owner_gives_it_back():
    allocator = PageAllocator(2)
    pages = allocator.take(1)
    allocator.hold(pages)
    allocator.hold(pages, cached=True)
    assert (allocator.users(0), allocator.shares(0), allocator.num_free, allocator.num_idle) == (2, 1, 1, 0)
    allocator.give_back(pages)
    allocator.give_back(pages)
    assert (allocator.num_free, allocator.num_cached, allocator.num_idle, allocator.available) == (1, 1, 1, 2)
    allocator.give_back(pages, cached=True)
    assert (allocator.num_free, allocator.num_cached, allocator.num_idle) == (2, 0, 0)
    with pytest.raises(AssertionError, match="is held but is not taken"):
        allocator.hold(pages)


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_counted_owners_agree_with_plain_counts(data):
    allocator, users, shares = PageAllocator(6), Counter(), Counter()
    for _ in range(data.draw(st.integers(0, 40))):
        taken = [page for page in range(6) if users[page] or shares[page]]
        match data.draw(st.sampled_from(["take", "hold", "back"])):
            case "take" if allocator.num_free:
                (page,) = allocator.take(1)
                assert page not in taken
                users[page] += 1
            case "hold" if taken:
                page, cached = data.draw(st.sampled_from(taken)), data.draw(st.booleans())
                allocator.hold([page], cached=cached)
                (shares if cached else users)[page] += 1
            case "back" if taken:
                page = data.draw(st.sampled_from(taken))
                cached = not users[page] or (bool(shares[page]) and data.draw(st.booleans()))
                allocator.give_back([page], cached=cached)
                (shares if cached else users)[page] -= 1
        check_allocator(allocator)
        assert [allocator.users(page) for page in range(6)] == [users[page] for page in range(6)]
        assert allocator.num_cached == sum(shares[page] > 0 for page in range(6))


def test_a_match_goes_on_from_the_deepest_point_on_its_way():
    cache, allocator, states = cache_of()
    tokens = insert(cache, allocator, 1, 2, 3, 4, 5, 6)
    first, _ = point_at(cache, states, 2, tokens)
    assert cache.match(array("i", [1, 2, 3, 4, 9]), "").point is first
    second, _ = point_at(cache, states, 6, tokens)
    assert cache.match(array("i", [1, 2, 3, 4, 9]), "").point is first
    assert cache.match(array("i", [1, 2, 3, 4, 5, 6, 9]), "").point is second
    assert cache.match(array("i", [9, 9, 9]), "").point is None
    check_tree(cache)


def test_a_share_that_no_point_has_is_noticed():
    cache, allocator, states = cache_of()
    point, _ = point_at(cache, states, 2, insert(cache, allocator, 1, 2))
    check_tree(cache)
    states.hold(point.pages[STATE], cached=True)
    with pytest.raises(AssertionError, match="shares in state pages are wrong"):
        check_tree(cache)


def test_a_page_of_a_point_that_there_is_not_is_noticed():
    cache, allocator, states = cache_of(num_states=8)
    point, _ = point_at(cache, states, 2, insert(cache, allocator, 1, 2))
    point.pages = {STATE: (*point.pages[STATE], 8)}
    with pytest.raises(AssertionError, match="shares in state pages are wrong"):
        check_tree(cache)


def test_pages_that_are_given_up_for_want_of_others_are_counted():
    cache, allocator, states = cache_of(num_states=3)
    tokens = insert(cache, allocator, 1, 2, 3, 4, 5, 6)
    first, second, third = (point_at(cache, states, position, tokens)[0] for position in (2, 4, 6))
    assert cache.points.num_evicted == {STATE: 0}
    cache.points.drop(third)
    cache.points.evict(STATE, 1)
    assert cache.points.num_evicted == {STATE: 0}, "one is free: nothing was given up for want of a page"
    cache.points.evict(STATE, 2)
    assert (first.is_dropped, second.is_dropped, cache.points.num_evicted) == (True, False, {STATE: 1})
    states.hold(second.pages[STATE])
    cache.points.drop_with(STATE, second.pages[STATE][0])
    assert (cache.points.num_evicted, cache.num_evicted) == ({STATE: 2}, 0), "the cache lost it, if no request did"
    cache.evict(2)
    assert (cache.points.num_evicted, cache.num_evicted) == ({STATE: 2}, 2)


def test_a_split_leaves_the_point_below_and_trimming_drops_it():
    cache, allocator, states = cache_of()
    tokens = insert(cache, allocator, 1, 2, 3, 4, 5, 6)
    point, _ = point_at(cache, states, 6, tokens)
    insert(cache, allocator, 1, 2, 9, 9)
    assert cache.match(array("i", [*tokens, 7]), "").point is point
    assert cache.match(array("i", [1, 2, 7]), "").point is None
    cache.evict(2)
    check_tree(cache)
    assert point.is_dropped or cache.match(array("i", [*tokens, 7]), "").point is point
    cache.evict(99)
    assert point.is_dropped
    assert states.num_free == states.num_pages


def test_a_point_whose_prefix_is_not_in_the_tree_is_not_taken():
    cache, allocator, states = cache_of()
    tokens = insert(cache, allocator, 1, 2)
    point, taken = point_at(cache, states, 4, array("i", [*tokens, 3, 4]))
    assert not taken
    assert not point.is_dropped


def test_a_second_point_at_one_place_goes_and_makes_a_passing_one_last():
    cache, allocator, states = cache_of()
    tokens = insert(cache, allocator, 1, 2)
    first, _ = point_at(cache, states, 2, tokens, passing=True)
    second, taken = point_at(cache, states, 2, tokens)
    assert taken
    assert second.is_dropped
    assert not first.passing
    check_tree(cache)


def test_ends_of_chunks_go_first_then_the_least_recently_used_and_a_hit_keeps_one_alone():
    cache, allocator, states = cache_of(num_states=4)
    tokens = insert(cache, allocator, 1, 2, 3, 4, 5, 6, 7, 8)
    old, deep, new = (point_at(cache, states, position, tokens)[0] for position in (2, 4, 6))
    passing, _ = point_at(cache, states, 8, tokens, passing=True)
    cache.points.use(deep)
    gone = []
    for count in range(1, 5):
        cache.points.evict(STATE, count)
        gone.append([point.is_dropped for point in (passing, old, new, deep)])
    assert gone == [[place <= count for place in range(4)] for count in range(4)]


def test_a_point_whose_page_is_used_is_not_given_up_for_nothing():
    cache, allocator, states = cache_of(num_states=2)
    tokens = insert(cache, allocator, 1, 2, 3, 4)
    used, _ = point_at(cache, states, 2, tokens)
    states.hold(used.pages[STATE])
    idle, _ = point_at(cache, states, 4, tokens)
    cache.points.evict(STATE, 1)
    assert idle.is_dropped
    assert not used.is_dropped


@pytest.mark.parametrize(("window", "pages"), [(1, 0), (2, 1), (17, 1), (18, 2), (128, 8), (129, 8), (130, 9)])
def test_a_window_reaches_over_the_pages_of_the_tokens_before_it(window, pages):
    """A token sees itself and `window` - 1 before it."""
    assert reach_of(window, 16) == pages


@pytest.mark.parametrize(("num_tokens", "pages"), [(1, 1), (33, 3), (10**6, 8 + 2 + 4)])
def test_what_a_sequence_may_need_of_a_window_is_bounded_by_its_reach_and_chunk(num_tokens, pages):
    assert most_window_pages(num_tokens, 64, reach=8, page_size=16) == pages


@given(
    window=st.integers(1, 40), page_size=st.sampled_from([1, 4, 16]), chunks=st.lists(st.integers(1, 20), min_size=1, max_size=30)
)
def test_a_window_holds_what_is_in_reach_and_no_more_at_any_length(window, page_size, chunks):
    """I5."""

    kind = WindowKind.of(1000, window=window, page_size=page_size)
    held, start = WindowPages(), 0
    for chunk in chunks:
        held.drop_before(kind.first_column(start))
        stop = start + chunk
        held.pages.extend(range(-(-stop // page_size) - held.stop))
        assert held.first * page_size <= max(0, start - window + 1)
        assert len(held.pages) <= most_window_pages(10**9, chunk, reach=reach_of(window, page_size), page_size=page_size)
        start = stop
    end = start // page_size
    assert held.ending_at(end, kind.reach) is None or len(held.ending_at(end, kind.reach)) == min(end, kind.reach)
