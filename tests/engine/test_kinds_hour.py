"""What `docs/benchmarks/kinds_hour.py` counts, by hand and then over a minute in which nothing is computed."""

from __future__ import annotations

import importlib
from array import array
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from enginery.contracts.batch import FULL, STATE, WINDOW
from enginery.kv.pages import PageAllocator
from enginery.kv.prefix import RadixPrefixCache
from enginery.kv.resume import ResumePoint, ResumePoints

SCRIPTS = Path(__file__).parents[2] / "docs" / "benchmarks"


@pytest.fixture(scope="module")
def hour() -> ModuleType:
    """The script, with its folder on the path as where Python runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        return importlib.import_module("kinds_hour")


@pytest.fixture(scope="module")
def counts(hour: ModuleType) -> ModuleType:
    return importlib.import_module("kinds_hour_counts")


class Tree:
    """A prefix cache of pages of 16 that `Watch` looks at, and where points can be put."""

    def __init__(self, counts: ModuleType, *, num_full: int = 16, num_states: int = 8) -> None:
        self.allocator, self.states = PageAllocator(num_full), PageAllocator(num_states)
        self.points = ResumePoints({STATE: self.states})
        self.cache = RadixPrefixCache(16, self.allocator, self.points)
        self.watch = counts.Watch(self.cache)

    def insert(self, *pages: int) -> list[int]:
        """Pages that are told apart by one number each. Returns the tokens."""
        tokens = [token for page in pages for token in [page] * 16]
        inserted = self.cache.insert(array("i", tokens), self.allocator.take(len(pages)), "")
        self.allocator.give_back(inserted.duplicates)
        return tokens

    def point(self, tokens: list[int]) -> ResumePoint:
        """One behind them."""
        pages = self.states.take(1)
        point = self.points.make(len(tokens), {STATE: tuple(pages)})
        self.states.give_back(pages)
        assert self.cache.attach(point, array("i", tokens), "")
        return point


def test_the_last_point_that_a_prompt_lacks_counts_at_the_second_in_which_it_was_given_up(counts: ModuleType) -> None:
    tree = Tree(counts, num_states=3)
    tokens = tree.insert(1, 2, 3)
    for length in (16, 32, 48):
        tree.point(tokens[:length])
    for second, num_free in ((5, 1), (7, 2)):
        tree.watch.second = second
        tree.points.evict(STATE, num_free)
    tree.watch.entered([*tokens[:32], 9, 9], 0)
    assert tree.watch.live == {STATE: Counter({7: 1})}
    assert tree.watch.num_given_up == {STATE: 2}
    tree.watch.entered([*tokens[:32], 9, 9], 0)
    assert tree.watch.live == {STATE: Counter({7: 1, 5: 1})}, "then the one before, which would have served too"
    tree.watch.entered([*tokens[:32], 9, 9], 0)
    assert tree.watch.live[STATE].total() == 2


@pytest.mark.parametrize(("prompt", "num_cached"), [([1] * 16 + [2] * 16, 0), ([9] * 48, 0), ([1] * 16 + [2] * 17, 32)])
def test_a_prompt_that_would_not_have_gone_on_from_it_makes_no_point_live(
    counts: ModuleType, prompt: list[int], num_cached: int
) -> None:
    """It is too short by the one token that is always computed, another's, or resumed there."""
    tree = Tree(counts, num_states=1)
    tree.point(tree.insert(1, 2))
    tree.points.evict(STATE, 1)
    tree.watch.entered(prompt, num_cached)
    assert not tree.watch.live


def test_full_pages_that_are_given_up_are_the_cause_of_the_points_that_go_with_them(counts: ModuleType) -> None:
    tree = Tree(counts, num_full=2)
    tokens = tree.insert(1, 2)
    tree.point(tokens)
    tree.cache.evict(1)
    tree.watch.entered([*tokens, 9], 0)
    assert tree.watch.live == {FULL: Counter({0: 1})}


def test_a_point_that_another_takes_the_place_of_was_not_given_up(counts: ModuleType) -> None:
    tree = Tree(counts)
    tokens = tree.insert(1, 2)
    tree.points.drop(tree.point(tokens))
    tree.watch.entered([*tokens, 9], 0)
    assert not tree.watch.live
    assert not tree.watch.num_given_up


def test_pages_behind_the_last_point_on_each_way_are_stranded_unless_somebody_uses_them(counts: ModuleType) -> None:
    tree = Tree(counts)
    tokens = tree.insert(1, 2, 3, 4)
    tree.insert(1, 2, 5)
    tree.insert(6)
    assert counts.num_stranded(tree.cache.root) == 6
    point = tree.point(tokens[:48])
    assert counts.num_stranded(tree.cache.root) == 3, "page 4, page 5 and page 6"
    used = tree.cache.match(array("i", [6] * 17), "").node
    tree.cache.lock(used)
    assert counts.num_stranded(tree.cache.root) == 2
    tree.points.drop(point)
    assert counts.num_stranded(tree.cache.root) == 5


def second(counts: ModuleType, number: int, **free: int) -> object:
    pages = {
        kind: counts.Pages(total=10, free=count, held=0, cached=10 - count, stranded=0, evicted=0) for kind, count in free.items()
    }
    return counts.Second(number, 1, 0, 0, 100, 40, 20, 1, pages)


def test_a_kind_idles_where_more_than_three_tenths_are_free_while_the_other_gives_up_what_is_asked_for(counts: ModuleType) -> None:
    tree = Tree(counts)
    tree.watch.live = {STATE: Counter({0: 2, 1: 1, 3: 1})}
    found = [second(counts, number, full=full, state=9) for number, full in enumerate((4, 3, 4, 4))]
    kinds = counts.summary(found, tree.watch)["kinds"]
    assert (kinds[FULL]["idle"], kinds[FULL]["idle_while_another_gives_up_live"]) == (0.75, 0.5)
    assert (kinds[STATE]["idle"], kinds[STATE]["idle_while_another_gives_up_live"]) == (1.0, 0.0)
    assert (kinds[STATE]["live_points_given_up"], kinds[STATE]["seconds_with_live_given_up"]) == (4, 3)


@pytest.mark.parametrize(("name", "kind"), [("qwen3-next", STATE), ("gpt-oss", WINDOW)])
def test_a_simulated_minute_counts_each_page_once(hour: ModuleType, tmp_path: Path, name: str, kind: str) -> None:
    run = next(run for run in hour.RUNS if run.name == name)._replace(rate=1.0, kv_gib=0.0025)
    told = hour.measured(run, 60, tmp_path / "seconds", simulated=True)
    lines = (tmp_path / "seconds").read_text().splitlines()
    assert len(lines) >= 55
    kinds = told["summary"]["kinds"]
    assert set(kinds) == {FULL, kind}
    for line in lines:
        for pages in hour.json.loads(line)["pages"].values():
            assert pages["free"] + pages["held"] + pages["cached"] == pages["total"]
            assert pages["stranded"] <= pages["cached"]
    assert sum(counts["live_points_given_up"] for counts in kinds.values()) > 0
    assert all(counts["live_points_given_up"] <= counts["points_given_up"] for counts in kinds.values())
    assert all(counts["evicted"] > 0 for counts in kinds.values())
    assert 0 < told["summary"]["hit_rate"] < 1
    here, real = told["in_tokens_of_full"]["here"], told["in_tokens_of_full"]["real"]
    assert here[kind] == pytest.approx(real[kind], rel=0.01), "the proportions are the real model's"
