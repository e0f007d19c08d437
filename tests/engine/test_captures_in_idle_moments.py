"""What an engine with a drafter captures while it has no work, so that loads begin with graphs: on a simulated device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from engine.draft_models import SELVES, asking, assert_told, branching
from engine.rank_answers import PROMPTS, assert_equal
from engine.rank_pair import request, serve
from engine.test_cuda_paths import MESHES, by_itself, folder_of, on_cuda, options
from engine.test_speculation import answers_of
from parity.oracle import Oracle

from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import FULL
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.engine.engine import Engine
from enginery.kv.pool import PagedKVPool
from enginery.plugin.registry import Registry
from enginery.worker.drafts import parts
from enginery.worker.paths import mixed_graphs
from enginery.worker.paths.captured_step import CapturedStep, Replayable
from enginery.worker.paths.cuda_capture import CudaCapture
from enginery.worker.paths.decode_capture import DecodeCapture, DecodeKey

SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SIZES = {"max_batch_requests": 24, "num_pages": 300, "page_size": 8}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each graph of whole steps that any rank captures."""
    found, call = list[int](), CudaCapture.__call__

    def noting(whole: CudaCapture, run: Callable[[], None]) -> Replayable:
        found.append(len(found))
        return call(whole, run)

    monkeypatch.setattr(CudaCapture, "__call__", noting)
    return found


def requests_of(number: int, **params: object) -> list[GenerationRequest]:
    """That begin and end together where all guesses are right."""
    return [request(f"{at}", [at, *PROMPTS[at % 4][:15]], max_tokens=40, **params) for at in range(number)]


def timed_alike(engine: Engine) -> None:
    """Each step takes as long: trials begin when steps have been counted, and no length but none is tried so soon."""
    drafting, turns = engine._drafting, count()
    assert drafting is not None
    drafting._clock = lambda: 0.01 * next(turns)


def prepare(engine: Engine, captures: list[int]) -> None:
    """All that there is for idle moments. A request that arrives waits for one graph at the most."""
    while (before := len(captures)) < 1000 and engine.prepare():
        assert len(captures) <= before + 1


@pytest.mark.parametrize("length", ["auto", "3"])
def test_loads_begin_without_captures(registry: Registry, captures: list[int], length: str) -> None:
    """Neither steps that verify, nor what guesses behind them, nor what a trial of none needs and comes back from.

    Nor where one request is left of some, which verifies what was guessed while they were more.
    """
    asked = dataclasses.replace(by_itself(**SIZES), draft_length=length)
    falling = [*requests_of(1), *(dataclasses.replace(each, params=SHORT) for each in requests_of(4)[1:])]
    loads = [falling, *(requests_of(number) for number in (1, 4, 2))]
    expected = [serve(Engine.build(options(**SIZES), registry), load) for load in loads]
    amid_streams = []
    for prepares in (False, True):
        with on_cuda(asked, registry) as (engine, devices):
            timed_alike(engine)
            at_start = len(captures)
            if prepares:
                prepare(engine, captures)
                assert len(captures) - at_start > 15
            before = len(captures)
            for load, wanted in zip(loads, expected, strict=True):
                assert_equal(serve(engine, load), wanted)
            amid_streams.append(len(captures) - before)
            assert engine.meter.stats().drafts.accepted > 20
            assert not any(device.waits for device in devices)
    assert amid_streams[0] > 5
    assert amid_streams[1] == 0


def test_guesses_are_captured_as_they_were_drawn(registry: Registry, captures: list[int]) -> None:
    """A load of another size, with sampling that there was, needs no capture."""
    asked = dataclasses.replace(by_itself(**SIZES), draft_length="3")
    drawn = {"temperature": 0.7, "seed": 3}
    with on_cuda(asked, registry) as (engine, _):
        prepare(engine, captures)
        before = len(captures)
        serve(engine, requests_of(1, **drawn))
        assert len(captures) > before, "nobody knew"
        prepare(engine, captures)
        before = len(captures)
        serve(engine, requests_of(4, **drawn))
        assert len(captures) == before


def test_so_are_those_of_a_model_with_windows(write_oracle: Callable[..., Oracle], registry: Registry, captures: list[int]) -> None:
    """Keys of windows are in pages of their own, which what follows does not write."""
    oracle, asked = (
        write_oracle("self mistral", SELVES["mistral"]),
        [asking(f"{at}", [7 + at, 5, 6], max_tokens=20) for at in range(4)],
    )
    plain = dataclasses.replace(options(**SIZES), model=str(oracle.folder))
    expected = answers_of(Engine.build(plain, registry), asked)
    drafting = dataclasses.replace(plain, drafter="standalone", draft_model=plain.model, draft_length="3")
    with on_cuda(drafting, registry) as (engine, _):
        for _ in range(2):
            prepare(engine, captures)
            before = len(captures)
            assert_told(answers_of(engine, asked), expected)
        assert len(captures) == before
        assert engine.meter.stats().drafts.accepted > 20


def test_captures_write_over_nothing_that_is_cached(
    registry: Registry, captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a graph of the target that ran: its rows are those of requests, whose pages keep prefixes for others."""
    asked, pools = dataclasses.replace(by_itself(**SIZES), draft_length="3"), list[PagedKVPool]()

    def noted(geometry: KVGeometry, device: torch.device) -> PagedKVPool:
        pools.append(PagedKVPool(geometry, device))
        return pools[-1]

    def kept() -> torch.Tensor:
        pages = [part[: engine._runner._pool.geometry.scratch_page(FULL)] for layer in pools[0]._layers for part in layer]
        return torch.stack([part.as_subclass(torch.Tensor) for part in pages])

    monkeypatch.setattr(parts, "PagedKVPool", noted)
    with on_cuda(asked, registry) as (engine, _):
        prepare(engine, captures)
        serve(engine, requests_of(4))
        drafts = engine._runner._draft_graphs
        assert drafts is not None
        before, was, num_follows = len(captures), kept(), len(drafts._follows)
        assert was.any()
        drafts._follows.clear()
        prepare(engine, captures)
        assert len(captures) - before == num_follows > 3
        assert torch.equal(kept(), was)


def test_without_memory_for_a_capture_no_more_are_tried_and_requests_go_on(
    registry: Registry, captures: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = dataclasses.replace(by_itself(**SIZES), draft_length="3")
    expected = serve(Engine.build(options(**SIZES), registry), requests_of(2))

    def full(whole: CudaCapture, run: Callable[[], None]) -> Replayable:
        raise torch.OutOfMemoryError("no memory")

    with on_cuda(asked, registry) as (engine, _):
        assert engine.prepare()
        before = len(captures)
        with monkeypatch.context() as patch:
            patch.setattr(CudaCapture, "__call__", full)
            while engine.prepare():
                pass
        assert "nothing more is captured in idle moments: no memory" in caplog.text
        while engine.prepare():
            pass
        assert len(captures) == before
        assert_equal(serve(engine, requests_of(2)), expected)
        assert len(captures) > before, "when they were needed"


def test_without_memory_for_a_capture_that_is_needed_such_steps_run_eagerly_from_then_on(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, tried = serve(Engine.build(options(**SIZES), registry), requests_of(2)), list[DecodeKey]()

    def full(steps: DecodeCapture, key: DecodeKey) -> CapturedStep:
        tried.append(key)
        raise torch.OutOfMemoryError("no memory")

    with on_cuda(dataclasses.replace(by_itself(**SIZES), draft_length="3"), registry) as (engine, _):
        monkeypatch.setattr(DecodeCapture, "capture", full)
        for _ in range(2):
            assert_equal(serve(engine, requests_of(2)), expected)
    assert len(tried) == len(set(tried)) > 0
    assert caplog.text.count("run eagerly from now on: no memory") == len(tried)


@pytest.mark.parametrize("whole", [True, False])
def test_without_memory_for_the_graphs_of_prompts_these_run_without_from_then_on(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, whole: bool
) -> None:
    """In pieces, where there is memory for those; else eagerly."""
    expected, tried = serve(Engine.build(options(**SIZES), registry), requests_of(2)), list[mixed_graphs.MixedKey]()
    provide, wanted = mixed_graphs.MixedGraphs.provide, {True} if whole else {True, False}

    def full(graphs: mixed_graphs.MixedGraphs, key: mixed_graphs.MixedKey) -> object:
        if key.whole not in wanted or key in graphs._captured:
            return provide(graphs, key)
        tried.append(key)
        raise torch.OutOfMemoryError("no memory")

    with on_cuda(options(**SIZES), registry) as (engine, _):
        pieces = engine._runner.pieces
        assert pieces is not None
        pieces._captured.clear()
        monkeypatch.setattr(mixed_graphs.MixedGraphs, "provide", full)
        for _ in range(3):
            assert_equal(serve(engine, requests_of(2)), expected)
        assert [key.whole for key in pieces._captured] == [False] * whole
    assert len(tried) == len(set(tried)) > 0
    assert caplog.text.count("from now on: no memory") == len(tried)


@pytest.mark.parametrize("changes", [MESHES["tp"], {"graphs": False}])
def test_nothing_is_captured_of_several_ranks_or_without_graphs(
    registry: Registry, captures: list[int], changes: dict[str, object]
) -> None:
    with on_cuda(dataclasses.replace(by_itself(**SIZES), draft_length="auto", **changes), registry) as (engine, _):
        for _ in range(2):
            before = len(captures)
            prepare(engine, captures)
            assert len(captures) == before, "other ranks would not take part"
            serve(engine, requests_of(2))


def test_without_a_drafter_plain_steps_are_captured_and_no_others(registry: Registry, captures: list[int]) -> None:
    with on_cuda(options(**SIZES), registry) as (engine, _):
        graphs = engine._runner.graphs
        assert graphs is not None
        before, num_sizes = len(captures), len(graphs.sizes)
        prepare(engine, captures)
        assert len(captures) - before == num_sizes - 1, "the largest was there"


@pytest.mark.parametrize(
    ("guesses", "most_keys", "kinds"),
    [
        *(("none", 1000, {(True, 1)}), ("none", 20, {(True, 1), (False, 1)})),
        *(("chain", 1000, {(True, 1), (True, 4)}), ("comb", 1000, {(True, 1), (False, 1)})),
        *(("none, latents", 1000, {(True, 1)}), ("none, latents", 20, {(True, 1), (False, 1)})),
    ],
)
def test_mixed_steps_are_captured_in_pieces_too_where_some_run_so(
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    guesses: str,
    most_keys: int,
    kinds: set[tuple[bool, int]],
) -> None:
    """They verify guesses that branch, or prompts may be long."""
    monkeypatch.setattr(mixed_graphs, "MOST_ABSORBED" if "latents" in guesses else "MOST_KEYS", most_keys)
    asked = dataclasses.replace(by_itself(**SIZES), draft_length="3")
    if "none" in guesses:
        asked = options(model=folder_of(tmp_path, "deepseek-v2-lite-experts" if "latents" in guesses else "llama"))
    with on_cuda(asked, branching(registry, "standalone") if guesses == "comb" else registry) as (engine, _):
        pieces = engine._runner.pieces
        assert pieces is not None
        while engine.prepare():
            pass
        assert {(key.whole, key.length) for key in pieces._captured} == kinds
        assert not pieces.waiting()
