"""Two lanes as processes tell what one rank tells, whatever is asked; and what they do not run with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from engine.rank_answers import ASKED, MLA, MOE, PROMPTS, SERVED, SMALL, assert_equal, assert_whole, folder_of, options, phases_of
from engine.rank_models import EXPERTS, LANES
from engine.rank_pair import KeptRanks, on_ranks, request, running, serve
from pairwise import EVERYTHING, spread

from enginery.contracts.batch import Phase
from enginery.contracts.parallel import ParallelFacts
from enginery.engine.engine import Engine
from enginery.errors import ConfigError, Unsupported
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose
from enginery.worker.ranks.groups import refuse_for_ranks


@pytest.mark.parametrize(
    ("name", "ep"),
    [*((name, False) for name in LANES), *((name, True) for name in LANES if name in EXPERTS)]
    if EVERYTHING
    else [(MLA, True), (MOE, False), ("gpt-oss", True), ("qwen3_next", False), ("nemotron_h_moe", True), ("lfm2", False)],
)
def test_two_lanes_tell_what_one_rank_tells(
    name: str, ep: bool, tmp_path: Path, registry: Registry, kept: KeptRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, which are short in one lane and long in the other; then a beginning that a lane has cached."""
    asked = options(model=folder_of(tmp_path, name), **SMALL)
    requests = [request(str(index), prompt, logprobs=1) for index, prompt in enumerate(PROMPTS)]
    last = request("last", PROMPTS[0], logprobs=1)
    with running(asked, registry, kept) as engine:
        one, alone = serve(engine, requests), serve(engine, [last])
    with running(dataclasses.replace(asked, dp_attention=2, ep=ep), registry, kept) as engine:
        seen = phases_of(engine, monkeypatch)
        assert_equal(serve(engine, requests), one)
        assert any(len(set(phases)) > 1 for phases in seen), "lanes were in different phases"
        del seen[:]
        again = serve(engine, [last])
        assert_equal(again, alone)
        assert again["last"].num_cached > 0
        assert {phases.index(Phase.IDLE) for phases in seen} == {1}, "the other lane has nothing to do, and runs"
        assert_whole(engine)


@pytest.mark.parametrize("overlap", spread([True, False], 1))
def test_whatever_is_asked_of_lanes_is_answered_alike(overlap: bool, tmp_path: Path, registry: Registry, kept: KeptRanks) -> None:
    """All kinds of requests in one batch, in chunks; with overlap, tokens that the host does not know are inputs in both lanes."""
    asked = options(model=folder_of(tmp_path, MLA), max_batch_tokens=24, overlap=overlap)
    requests = [
        request(f"{name} {place}", prompt, **params) for name, params in ASKED.items() for place, prompt in enumerate(PROMPTS)
    ]
    requests += [request(f"embedding {place}", prompt, embed=True, max_tokens=1) for place, prompt in enumerate(PROMPTS)]
    one = on_ranks(asked, registry, kept, requests)
    two = on_ranks(dataclasses.replace(asked, dp_attention=2, ep=overlap), registry, kept, requests)
    assert sum(map(len, (told.prompt for told in one.values()))) == sum(map(len, PROMPTS))
    assert_equal(two, one)


@pytest.mark.parametrize("overlap", spread([False, True], 1))
def test_preempted_and_aborted_requests_leave_both_lanes_whole(
    overlap: bool, tmp_path: Path, registry: Registry, kept: KeptRanks
) -> None:
    few = {"num_pages": 12, "page_size": 4, "max_model_len": 48, "max_batch_tokens": 16, "overlap": overlap}
    asked = options(model=folder_of(tmp_path, MOE), **few)
    requests = [request(str(index), prompt[:8], max_tokens=24) for index, prompt in enumerate(PROMPTS + PROMPTS)]
    one = on_ranks(asked, registry, kept, requests, aborts=["1", "5"])
    with running(dataclasses.replace(asked, dp_attention=2, ep=True), registry, kept) as engine:
        two = serve(engine, requests, aborts=["1", "5"])
        stats = engine.meter.stats()
        assert_whole(engine)
        assert engine.flush_prefix_cache() == sum(lane.pages["full"].cached for lane in stats.lanes) > 0
        assert {lane.pages["full"].cached for lane in engine.meter.stats().lanes} == {0}
    assert_equal(two, one)
    assert stats.num_preempted > 0


def test_two_lanes_of_two_tensor_ranks(tmp_path: Path, registry: Registry) -> None:
    """Four processes: heads are divided within a lane, experts among all."""
    asked = options(model=folder_of(tmp_path, MLA), **SMALL)
    requests = [request(f"{name} {place}", PROMPTS[place], **ASKED[name]) for place, name in enumerate(("greedy", "logprobs"))]
    one = serve(Engine.build(asked, registry), requests)
    engine = Engine.build(dataclasses.replace(asked, tp=2, dp_attention=2, ep=True), registry)
    try:
        assert_equal(serve(engine, requests), one)
        assert ("lanes", "2") in {(setting, value) for setting, value, _ in engine.facts.decisions}
        assert engine.facts.num_pages == 2 * SMALL["num_pages"]
    finally:
        engine.close()


@pytest.mark.parametrize(("mesh", "lanes"), [({"tp": 2}, 1), ({"dp_attention": 2}, 2)], ids=["ranks", "lanes"])
def test_the_load_of_each_rank_s_experts_is_told(
    mesh: dict[str, int], lanes: int, tmp_path: Path, registry: Registry, kept: KeptRanks
) -> None:
    """Of the first step, a prompt of 36 tokens: rows times experts of a token times layers, those that pad a lane included."""
    asked = options(model=folder_of(tmp_path, MOE), page_size=4, num_pages=128, **mesh)
    config = SERVED[MOE]
    with running(dataclasses.replace(asked, ep=True), registry, kept) as engine:
        assert engine.meter.stats().experts.by_rank == (0, 0)
        serve(engine, [request("a", PROMPTS[0], max_tokens=1)])
        found = engine.meter.stats().experts
    assert (config["num_hidden_layers"], config["decoder_sparse_step"], config["mlp_only_layers"]) == (4, 2, []), "two have experts"
    rows = len(PROMPTS[0]) + 1  # in the last layer that of the next token alone
    assert sum(found.by_rank) == lanes * rows * config["num_experts_per_tok"]
    assert min(found.by_rank) > 0
    assert max(found.by_rank) <= found.busiest < sum(found.by_rank)
    assert 0.5 < found.balancedness <= 1.0
    with running(asked, registry, kept) as engine:
        serve(engine, [request("a", PROMPTS[0], max_tokens=1)])
        assert engine.meter.stats().experts.by_rank == ()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"drafter": "lookup"}, "--dp-attention 2 does not run with --drafter yet"),
        ({"drafter": "lookup", "micro_batches": True}, "does not run with --drafter and --micro-batches yet"),
        ({"dp_attention": 0}, "dp_attention is 0, but must be at least 1"),
    ],
    ids=str,
)
def test_what_lanes_do_not_run_with_is_refused_by_name(changes: dict[str, object], why: str, registry: Registry) -> None:
    with pytest.raises(ConfigError, match=why):
        choose(options(**{"dp_attention": 2, **changes}), registry)


def test_a_family_that_does_not_run_in_lanes_is_refused_by_name(tmp_path: Path, registry: Registry) -> None:
    choice = choose(options(model=folder_of(tmp_path, "bamba")), registry, parallel=ParallelFacts(num_lanes=2))
    family = dataclasses.replace(choice.family, spec=dataclasses.replace(choice.family.spec, lanes=False))
    with pytest.raises(Unsupported, match=r"the family bamba, from .* does not run in lanes; leave --dp-attention out"):
        refuse_for_ranks(dataclasses.replace(choice, family=family))
