"""Drafts that branch: slots by row, positions by depth, and what each row sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from core.worker.step_values import item, new_pages, step_of

from enginery.contracts.attention import AttnLayerFacts, KVGeometry, LocalLayerId
from enginery.contracts.batch import FULL, WINDOW, Phase
from enginery.contracts.drafting import DraftTree
from enginery.contracts.step import StepInput
from enginery.errors import Unsupported
from enginery.kv.pool import PagedKVPool
from enginery.worker.drafts import trees
from enginery.worker.layout import lay_out
from enginery.worker.page_tables import PageTables

PARENTS = np.array([[0, 0, 0, 1, 3, 2], [0, 0, 1, 0, 0, 0]])  # by row; the second request has two drafts, which are a chain


def tree_step() -> StepInput:
    drafts = [item(seat, start, 1 + count, num_drafts=count) for seat, start, count in ((0, 7, 5), (1, 2, 2))]
    return step_of(
        *drafts,
        item(2, 0, 3),
        phase=Phase.MIXED,
        num_decode=2,
        decode_len=6,
        parents=np.array([0, 0, 1, 3, 2, 0, 1], np.int32).tobytes(),
        pages=new_pages((0, 0, 0, [4, 9, 6, 8]), (1, 0, 0, [2, 3]), (2, 0, 0, [5])),
    )


@pytest.fixture
def tables() -> PageTables:
    return PageTables(KVGeometry(pages={FULL: 50}, page_size=4, layers=(), dtype="float32", num_seats=3))


def test_a_row_has_a_slot_of_its_own_and_the_position_of_its_depth(tables: PageTables) -> None:
    tables.take(step := tree_step())
    batch = lay_out(step, tables)
    assert batch.positions.tolist() == [7, 8, 8, 9, 10, 9, 2, 3, 4, 2, 2, 2, 0, 1, 2]
    assert batch.pages.slots.tolist()[:6] == [39, 24, 25, 26, 27, 32]
    assert batch.pages.slots.tolist()[6:9] == [10, 11, 12]
    assert batch.trees
    assert "trees" in batch.given


def test_a_row_sees_those_on_its_way_and_itself() -> None:
    step = tree_step()
    assert trees.parents_of(step).tolist() == PARENTS.tolist()
    assert trees.ways_of(step) == [[[1], [2], [1, 3], [1, 3, 4], [2, 5]], [[1], [1, 2]]]
    seen = trees.seen_of(PARENTS)
    assert [row.nonzero()[0].tolist() for row in seen[0]] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4], [0, 2, 5]]
    assert [row.nonzero()[0].tolist() for row in seen[1, :3]] == [[0], [0, 1], [0, 1, 2]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("right", [[3, 2], [2, 0], [0, 1]])
def test_what_stands_is_brought_together_in_all_layers_and_nothing_else_changes(
    tables: PageTables, dtype: str, right: list[int]
) -> None:
    tables.take(step := tree_step())
    batch = lay_out(step, tables)
    layers = (AttnLayerFacts(num_heads=2, num_kv_heads=1, head_dim=3), AttnLayerFacts(num_heads=1, num_kv_heads=1, head_dim=2))
    pool = PagedKVPool(KVGeometry(pages={FULL: 50}, page_size=4, layers=layers, dtype=dtype), torch.device("cpu"))
    for index in range(2):
        for pages in pool.layer(LocalLayerId(index)):
            pages.copy_(torch.randint(-8, 8, pages.shape, generator=torch.Generator().manual_seed(index)))
    before = [[each.to(torch.float32, copy=True) for each in pool.by_slot(LocalLayerId(index))] for index in range(2)]
    paths = torch.tensor([[0, 1, 3, 4, 4, 4], [0, 1, 2, 2, 2, 2]])
    trees.move_standing(batch, paths, torch.tensor(right), pool)
    slots = batch.pages.slots
    source = torch.arange(51 * 4)
    source[slots[:6][: right[0] + 1]] = slots[paths[0, : right[0] + 1]]
    for index in range(2):
        for old, new in zip(before[index], pool.by_slot(LocalLayerId(index)), strict=True):
            assert torch.equal(new.float(), old[source])


def test_what_no_worker_runs_is_refused_by_name(tables: PageTables) -> None:
    windows = PageTables(KVGeometry(pages={FULL: 50, WINDOW: 9}, page_size=4, layers=(), dtype="float32", num_seats=3))
    windows.take(step := tree_step())
    with pytest.raises(Unsupported, match="tree parents"):
        lay_out(step, windows)


@pytest.mark.parametrize("parents", [(0,), (-2, 0), (-1, 1), (-1, -1, -1)])
def test_what_is_no_tree_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="is no tree"):
        DraftTree((4, 5), parents)


def test_a_tree_s_first_tokens_are_a_tree() -> None:
    tree = DraftTree((4, 5, 6, 7), (-1, 0, 0, 2))
    assert (tree[:3], len(tree), list(tree), tree[-1]) == (DraftTree((4, 5, 6), (-1, 0, 0)), 4, [4, 5, 6, 7], 7)
    assert [tree.is_chain, tree[:2].is_chain, tree[:0].is_chain] == [False, True, True]
