"""Two lanes in two stages, four processes: what one process tells, with as many steps on their way as there are stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.rank_answers import ASKED, MLA, MOE, PROMPTS, SMALL, assert_equal, assert_whole, folder_of, options, phases_of
from engine.rank_models import EXPERTS, LANES
from engine.rank_pair import KeptRanks, request, running, serve
from pairwise import EVERYTHING

from enginery.contracts.batch import Phase
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

MESH = {"pp": 2, "dp_attention": 2}


@pytest.fixture(scope="module")
def kept() -> Iterator[KeptRanks]:
    ranks = KeptRanks(3)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize(
    ("name", "ep"),
    [(name, name in EXPERTS) for name in LANES]
    if EVERYTHING
    else [(MLA, True), ("gemma2", False), ("mamba2", False), ("nemotron_h_moe", True)],
)
def test_lanes_of_two_stages_tell_what_one_rank_tells(
    name: str, ep: bool, tmp_path: Path, registry: Registry, kept: KeptRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a feed-forward sums of all lanes cross; not where they are normed, as in gemma2, or behind mixers, as in Mamba2."""
    asked = options(model=folder_of(tmp_path, name), **SMALL)
    requests = [request(f"{way} {place}", PROMPTS[place % 4], **ASKED[way]) for place, way in enumerate((*ASKED, "greedy"))]
    with running(asked, registry, kept) as engine:
        one, alone = serve(engine, requests), serve(engine, [request("last", PROMPTS[1])])
    with running(dataclasses.replace(asked, ep=ep, **MESH), registry, kept) as engine:
        assert_equal(serve(engine, requests), one, within=1e-4)  # qwen3_5_moe rounds by 4e-5
        seen = phases_of(engine, monkeypatch)
        assert_equal(serve(engine, [request("last", PROMPTS[1])]), alone)
        assert all(Phase.IDLE in phases for phases in seen)
        assert_whole(engine)


def test_preemption_and_aborts_with_steps_on_their_way(tmp_path: Path, registry: Registry, kept: KeptRanks) -> None:
    few = {"num_pages": 14, "page_size": 4, "max_model_len": 56, "max_batch_tokens": 16}
    asked = options(model=folder_of(tmp_path, MOE), **few)
    requests = [request(str(index), prompt[:8], max_tokens=24) for index, prompt in enumerate(PROMPTS + PROMPTS)]
    one = serve(Engine.build(asked, registry), requests, aborts=["1", "5"])
    with running(dataclasses.replace(asked, ep=True, **MESH), registry, kept) as engine:
        found = serve(engine, requests, aborts=["1", "5"])
        assert engine.meter.stats().num_preempted > 0
        assert_whole(engine)
    assert_equal(found, one)
