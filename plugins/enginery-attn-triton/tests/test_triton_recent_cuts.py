"""Which steps a recent cut of decoding requests serves, and how it moves on with them."""

from __future__ import annotations

import dataclasses

import numpy as np
from cut_shapes import DEEPSEEK, H200, LLAMA, lens
from hypothesis import given
from hypothesis import strategies as st

from enginery.kv.shared_prefixes import SharedPrefix
from enginery_attn_triton.splitting import RECUT_KEYS, RecentCut
from enginery_attn_triton.tiling import LayerCut


@given(
    kv_lens=st.lists(st.integers(300, 2000), min_size=2, max_size=80),
    steps=st.lists(st.integers(0, 20), min_size=1, max_size=4),
)
def test_a_recent_cut_serves_requests_that_have_grown_a_little(kv_lens, steps) -> None:
    cut = LayerCut.of(LLAMA, itemsize=2, device=H200).decode
    recent = RecentCut(lens(*kv_lens), cut, columns=200, page_size=16, shared=[SharedPrefix(0, 2, 16)])
    for grown in steps:
        now = lens(*(length + grown * (place % 2) for place, length in enumerate(kv_lens)))
        assert recent.followed_by(now, columns=200 + grown, shared=[SharedPrefix(0, 2, 16)])
        items, splits, _ = recent.cutting
        assert (items[:, 1] == items[:, 0] * (200 + grown)).all()
        for row, kv_len in enumerate(now):
            mine = items[(items[:, 0] <= row) & (row < items[:, 0] + items[:, 5])]
            mine = mine[np.argsort(mine[:, 2])]
            assert (mine[0, 2], mine[-1, 3]) == (0, kv_len)
            assert (mine[1:, 2] == mine[:-1, 3]).all()
            assert mine[:, 4].tolist() == (list(range(splits[row, 1])) or [-1])


@given(
    kv_lens=st.lists(st.integers(60, 3000), min_size=1, max_size=64),
    steps=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    length=st.sampled_from((2, 4, 5, 8)),
    facts=st.sampled_from((LLAMA, DEEPSEEK, dataclasses.replace(DEEPSEEK, num_heads=16))),
)
def test_a_recent_cut_serves_verifications_that_have_grown_unequally(kv_lens, steps, length, facts) -> None:
    cut = LayerCut.of(facts, itemsize=2, device=H200, length=length).decode
    recent, now = RecentCut(lens(*kv_lens), cut, columns=200, page_size=16, shared=[]), lens(*kv_lens)
    for grown in steps:
        now = lens(*(kv_len + grown * place % 9 for place, kv_len in enumerate(now.tolist())))
        if not recent.followed_by(now, columns=200 + grown, shared=[]):
            assert max(now - lens(*kv_lens)) > RECUT_KEYS
            return
        items, splits, _ = recent.cutting
        assert (items[:, 1] == items[:, 0] // length * (200 + grown)).all()
        assert (items[:, 6] == now[items[:, 0] // length] - length + items[:, 0] % length).all()
        for row in range(len(now) * length):
            mine = items[(items[:, 0] <= row) & (row < items[:, 0] + items[:, 5])]
            mine = mine[np.argsort(mine[:, 2])]
            assert mine[0, 2] == 0
            assert mine[-1, 3] == mine[-1, 6] + mine[-1, 5]  # up to its own key, and those of the rows that it shares the item with
            assert (mine[1:, 2] == mine[:-1, 3]).all()
            assert mine[:, 4].tolist() == (list(range(splits[row, 1])) or [-1])


def test_a_recent_cut_does_not_serve_other_lengths_or_prefixes() -> None:
    cut, shared = LayerCut.of(LLAMA, itemsize=2, device=H200).decode, [SharedPrefix(0, 2, 16)]
    recent = RecentCut(lens(500, 600), cut, columns=200, page_size=16, shared=shared)
    assert recent.followed_by(lens(501, 632), columns=200, shared=shared)
    assert not recent.followed_by(lens(501, 633), columns=200, shared=shared)
    assert not recent.followed_by(lens(499, 600), columns=200, shared=shared)
    assert not recent.followed_by(lens(500, 600, 1), columns=200, shared=shared)
    assert not recent.followed_by(lens(501, 601), columns=200, shared=[])
    windowed = LayerCut.of(dataclasses.replace(LLAMA, sliding_window=600), itemsize=2, device=H200).decode
    recent = RecentCut(lens(500, 900), windowed, columns=200, page_size=16, shared=[])
    assert recent.followed_by(lens(532, 2000), columns=200, shared=[])
    assert not recent.followed_by(lens(533, 2001), columns=200, shared=[])
    assert not recent.followed_by(lens(532, 599), columns=200, shared=[])
    verifying = LayerCut.of(dataclasses.replace(LLAMA, sliding_window=600), itemsize=2, device=H200, length=4).decode
    recent = RecentCut(lens(602, 900), verifying, columns=200, page_size=16, shared=[])
    assert not recent.followed_by(lens(603, 901), columns=200, shared=[])  # the first one's rows begin alike no more


@given(
    kv_lens=st.lists(st.integers(1, 1500), min_size=1, max_size=40),
    window=st.integers(1, 600),
    steps=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    length=st.sampled_from((1, 1, 3)),
    page_size=st.sampled_from((1, 16)),
)
def test_a_recent_cut_moves_on_with_windows(kv_lens, window, steps, length, page_size) -> None:
    """Lengths count what is held: whole pages behind the window are given back."""
    cut = LayerCut.of(dataclasses.replace(LLAMA, sliding_window=window), itemsize=2, device=H200, length=length).decode

    def held(all_keys: np.ndarray) -> np.ndarray:
        return all_keys - np.maximum(all_keys - length + 1 - window, 0) // page_size * page_size

    now = lens(*kv_lens) + np.int32(length)
    recent, begun = RecentCut(held(now), cut, columns=200, page_size=page_size, shared=[]), now
    for grown in steps:
        now = now + np.arange(len(now), dtype=np.int32) * grown % 7 + 1
        lengths = held(now)
        if not recent.followed_by(lengths, columns=100 + grown, shared=[]):
            full = begun >= window + length - 1
            assert (length > 1 and not full.all()) or (np.minimum(now, window) - np.minimum(begun, window)).max() > RECUT_KEYS
            return
        items, splits, _ = recent.cutting
        assert (items[:, 1] == items[:, 0] // length * (100 + grown)).all()
        for row in range(len(now) * length):
            request, inside = divmod(row, length)
            mine = items[(items[:, 0] <= row) & (row < items[:, 0] + items[:, 5])]
            mine = mine[np.argsort(mine[:, 2])]
            above = mine[0, 0] % length
            assert mine[0, 2] == max(0, lengths[request] - length + above + 1 - window)
            assert mine[-1, 3] == lengths[request] - length + above + mine[0, 5]
            assert length == 1 or (mine[:, 6] + row - mine[:, 0] == lengths[request] - length + inside).all()
            assert (mine[1:, 2] == mine[:-1, 3]).all()
            assert mine[:, 4].tolist() == (list(range(splits[row, 1])) or [-1])
