"""Decoding steps of several ranks are recorded on CPUs, exchanges among them, and tell what eager ones tell."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from engine.rank_answers import ASKED, MOE, PROMPTS, assert_equal, assert_whole, folder_of, options
from engine.rank_pair import KeptRanks, Told, request, running, serve
from pairwise import EVERYTHING

from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.worker.paths.recorded_steps import RecordedSteps

compiled = pytest.importorskip("enginery_attn_cpu.native_part", reason="the plugin is not installed").kernels
pytestmark = pytest.mark.skipif(compiled is None, reason="its compiled part was not built")

MESHES = {"ranks": {"tp": 2}, "lanes": {"dp_attention": 2}}
REQUESTS = [
    *(request(f"{way} {place}", PROMPTS[place % 4], **{"max_tokens": 12, **ASKED[way]}) for place, way in enumerate(ASKED)),
    request("embedding", PROMPTS[0], embed=True, max_tokens=1),
]


@pytest.fixture(scope="module")
def alone(registry: Registry) -> dict[str, Told]:
    return serve(Engine.build(options(graphs=False, page_size=4, num_pages=128), registry), REQUESTS)


def recorded(engine: Engine) -> list[int]:
    assert isinstance(engine._runner.graphs, RecordedSteps)
    assert engine._runner.graphs.steps.head is None
    return sorted(key.size for key in engine._runner.graphs.captured)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("overlap", [False, True] if EVERYTHING else [True])
def test_recorded_steps_tell_what_one_process_tells_eagerly(
    mesh: str, overlap: bool, registry: Registry, kept: KeptRanks, alone: dict[str, Told]
) -> None:
    """Greedy ones and others, while they come and go; then one alone, whose other lane has nothing to do."""
    asked = options(page_size=4, num_pages=128, overlap=overlap, **MESHES[mesh])
    with running(asked, registry, kept) as engine:
        assert_equal(serve(engine, REQUESTS), alone)
        stats, name = engine.meter.stats(), "greedy 0"
        assert stats.num_graph_steps > 5
        assert recorded(engine)
        one = serve(engine, [each for each in REQUESTS if each.request_id == name])
        assert_equal(one, {name: alone[name]})
        assert 1 in recorded(engine)
        assert engine.meter.stats().num_graph_steps > stats.num_graph_steps + 5
        if mesh == "lanes":
            assert_whole(engine)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_that_cannot_record_runs_the_same_steps_eagerly(
    mesh: str, registry: Registry, kept: KeptRanks, alone: dict[str, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on with theirs: exchanges are of as many rows. Five are padded to six."""
    with running(options(page_size=4, num_pages=128, **MESHES[mesh]), registry, kept) as engine:
        monkeypatch.setattr(RecordedSteps, "ready", lambda self, step: False)
        assert_equal(serve(engine, REQUESTS), alone)
        assert engine.meter.stats().num_graph_steps == 0


def test_a_model_that_cannot_be_recorded_runs_eagerly_on_all_ranks(tmp_path: Path, registry: Registry, kept: KeptRanks) -> None:
    asked = options(model=folder_of(tmp_path, MOE), page_size=4, num_pages=128)
    requests = [request(str(place), prompt) for place, prompt in enumerate(PROMPTS[:2])]
    one = serve(Engine.build(dataclasses.replace(asked, graphs=False), registry), requests)
    with running(dataclasses.replace(asked, tp=2), registry, kept) as engine:
        assert_equal(serve(engine, requests), one)
        assert engine.meter.stats().num_graph_steps == 0
        assert engine._runner.sizes.graphs == ()


def test_stages_are_not_recorded(registry: Registry, kept: KeptRanks) -> None:
    """What arrives from the stage before has a place of its own in each step."""
    with running(options(page_size=4, num_pages=128, pp=2), registry, kept) as engine:
        assert engine._runner.graphs is None
