"""What several engines, lanes and ranks with experts are at together."""

from __future__ import annotations

import dataclasses

from enginery.contracts.engine import DraftCounts, EngineStats, ExpertCounts, KernelState
from enginery.contracts.schedule import LaneCounts, PageCounts
from enginery.serve.engine.totals import of_ended, total
from enginery.serve.http import metrics


def test_counters_of_engines_add_up():
    one = EngineStats(
        num_running=2,
        host_s=0.5,
        steps_by_size=(1, 2),
        attn_backend="a",
        steps_by_backend={"a": 3},
        kernels=KernelState(seconds=2.0),
        pages={"full": PageCounts(free=1, cached=2, total=4, held=3, evicted=5)},
        drafts=DraftCounts(told=3, by_position=(1,)),
    )
    both = total([one, dataclasses.replace(one, attn_backend="b", steps_by_backend={"b": 1, "a": 1}, steps_by_size=(1,))])
    assert total([one]) is one
    assert (both.num_running, both.host_s, both.steps_by_size, both.attn_backend) == (4, 1.0, (2, 2), "a+b")
    assert both.steps_by_backend == {"a": 4, "b": 1}
    assert both.pages == {"full": PageCounts(free=2, cached=4, total=8, held=6, evicted=10)}
    assert (both.drafts.told, both.drafts.by_position, both.kernels.seconds) == (6, (2,), 2.0)
    failed = total([one, dataclasses.replace(one, drafts=DraftCounts(failure="why"))])
    assert (failed.drafts.failure, both.drafts.failure) == ("why", "")


def test_an_engine_that_has_ended_holds_nothing_and_keeps_its_counters():
    pages = {"full": PageCounts(free=1, cached=2, total=4, held=3, evicted=5)}
    lanes = (LaneCounts(num_running=3, num_waiting=1, pages=pages),)
    kernels = KernelState(compiling=("attention",), seconds=2.0)
    counters = EngineStats(num_steps=7, num_preempted=2, drafts=DraftCounts(told=3))
    held = {"num_running": 3, "num_waiting": 1, "free_pages": 1, "cached_pages": 2}
    left = of_ended(dataclasses.replace(counters, **held, pages=pages, lanes=lanes, kernels=kernels))
    assert left == dataclasses.replace(counters, pages={"full": PageCounts(free=0, cached=0, total=4, evicted=5)})


def test_lanes_are_told_one_by_one():
    pages = {"full": PageCounts(free=1, cached=2, total=4)}
    stats = EngineStats(
        lanes=(LaneCounts(num_running=3, num_waiting=1, pages=pages), LaneCounts(num_running=0, num_waiting=5, pages={}))
    )
    told = {(sample.name, *sample.labels.values()): sample.value for metric in metrics._lanes(stats) for sample in metric.samples}
    assert {key[1:]: value for key, value in told.items() if key[0] == "enginery:lane_requests"} == {
        ("0", "running"): 3,
        ("0", "waiting"): 1,
        ("1", "running"): 0,
        ("1", "waiting"): 5,
    }
    assert told["enginery:lane_memory_pages", "0", "full", "free"] == 1
    assert not list(metrics._lanes(EngineStats()))
    assert total([stats, stats]).lanes == 2 * stats.lanes


def test_how_even_the_experts_work_is_is_told():
    """As SGLang's balancedness: the mean by the most. Of several engines tokens add up."""
    one = EngineStats(experts=ExpertCounts(by_rank=(30, 50), busiest=60))
    told = {
        (sample.name, *sample.labels.values()): sample.value for each in metrics._experts(one.experts) for sample in each.samples
    }
    assert {name: value for name, value in told.items() if not name[0].endswith("_created")} == {
        ("enginery:expert_tokens_total", "0"): 30,
        ("enginery:expert_tokens_total", "1"): 50,
        ("enginery:expert_tokens_busiest_total",): 60,
        ("enginery:expert_balancedness",): 80 / 2 / 60,
    }
    assert not list(metrics._experts(EngineStats().experts))
    assert EngineStats().experts.balancedness == 1.0
    assert total([one, one]).experts == ExpertCounts(by_rank=(60, 100), busiest=120)
