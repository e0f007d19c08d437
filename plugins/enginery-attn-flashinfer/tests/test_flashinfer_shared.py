"""Groups of requests with the same first pages."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from enginery_attn_flashinfer.shared import SharedPrefix, shared_prefixes


def ints(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def saved(groups: list[SharedPrefix]) -> int:
    return sum((group.count - 1) * group.num_pages for group in groups)


@given(
    depths=st.lists(st.integers(0, 6), min_size=0, max_size=12),
    more=st.lists(st.integers(1, 12), min_size=13, max_size=13),
    page_size=st.sampled_from([1, 4]),
    least=st.integers(1, 9),
    min_requests=st.integers(2, 4),
)
def test_groups_share_their_pages_and_the_one_that_saves_most_is_among_them(depths, more, page_size, least, min_requests) -> None:
    columns, fresh = 20, iter(range(1, 1000))
    table = [[next(fresh) for _ in range(columns)]]
    for depth in depths:  # each request has so many pages in common with the one before
        table.append(table[-1][:depth] + [next(fresh) for _ in range(columns - depth)])
    kv_lens = [count * page_size for count in more[: len(table)]]
    groups = shared_prefixes(ints(table), ints(kv_lens), page_size=page_size, min_tokens=least, min_requests=min_requests)
    end = 0
    for group in groups:
        assert group.first >= end
        end = group.first + group.count
        assert group.count >= min_requests
        assert group.num_pages * page_size >= least
        rows = range(group.first, end)
        assert len({tuple(table[row][: group.num_pages]) for row in rows}) == 1
        assert all(group.num_pages <= (kv_lens[row] - 1) // page_size for row in rows)
    assert end <= len(table)
    best = 0
    for first in range(len(table)):
        for last in range(first + min_requests, len(table) + 1):
            rows = range(first, last)
            common = min((kv_lens[row] - 1) // page_size for row in rows)
            while len({tuple(table[row][:common]) for row in rows}) > 1:
                common -= 1
            if common * page_size >= least:
                best = max(best, (last - first - 1) * common)
    assert max([0, *(saved([group]) for group in groups)]) == best


def test_a_group_beside_another_is_found_and_rows_that_only_pad_are_in_none() -> None:
    table = np.arange(12 * 40).reshape(12, 40)
    table[0:4, :33], table[5:10, :36] = 1000 + np.arange(33), 2000 + np.arange(36)
    table[10:] = 480
    kv_lens = ints([40 * 16] * 10 + [1, 1])
    assert shared_prefixes(ints(table), kv_lens, page_size=16) == [
        SharedPrefix(first=0, count=4, num_pages=33),
        SharedPrefix(first=5, count=5, num_pages=36),
    ]


def test_the_page_of_a_last_token_is_never_shared() -> None:
    table = ints([list(range(40))] * 4)
    for length, pages in ((33 * 16, 32), (33 * 16 + 1, 33)):
        assert shared_prefixes(table, ints([length] * 4), page_size=16)[0].num_pages == pages
    assert shared_prefixes(table, ints([32 * 16] * 4), page_size=16) == []


def test_few_requests_short_prefixes_and_narrow_tables_are_left_alone() -> None:
    table = ints([list(range(40))] * 4)
    assert shared_prefixes(table[:3], ints([600] * 3), page_size=16) == []
    assert shared_prefixes(table, ints([500] * 4), page_size=16) == []
    assert shared_prefixes(table[:, :31], ints([496] * 4), page_size=16) == []
    assert shared_prefixes(ints(np.zeros((0, 1))), ints([]), page_size=16) == []


def test_it_costs_little_where_nothing_is_shared() -> None:
    table, kv_lens = ints(np.arange(256 * 128).reshape(256, 128)), ints([2048] * 256)
    times = []
    for _ in range(200):
        began = time.perf_counter()
        shared_prefixes(table, kv_lens, page_size=16)
        times.append(time.perf_counter() - began)
    assert min(times) < 50e-6
