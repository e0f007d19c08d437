"""Two processes, through gloo, tell what one tells: every family, and whatever is asked of an engine; as ranks, and as lanes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import noise
import pytest
import torch
from engine import test_model_heads
from engine.draft_models import SAID, embedded, prompt_of
from engine.heads_made import Module
from engine.rank_pair import KeptRanks, Told, on_ranks, request, running, serve
from engine.test_ranks import CONFIGS, EXPERTS, LANES
from pairwise import EVERYTHING, spread
from parity import engine_driver, test_hybrids, test_mamba
from parity.oracle import Oracle

from enginery.config.schema import EngineOptions
from enginery.contracts.batch import Phase
from enginery.contracts.parallel import ParallelFacts
from enginery.contracts.step import StepInput
from enginery.engine.engine import Engine
from enginery.errors import ConfigError, EngineDied, EnginError, Unsupported
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose
from enginery.worker.drafts.draft_model import DraftModel
from enginery.worker.loading import check_weights
from enginery.worker.ranks.groups import refuse_for_ranks

module_of = test_model_heads.module_of  # a fixture
MLA, MOE = "deepseek-v2-lite-experts", "qwen3-moe"
SMALL = {"max_batch_tokens": 32, "page_size": 4, "num_pages": 128}
PROMPTS = [[5, 77, 200, 31] * 9, [8, 9, 140], [3] * 20, [5, 77, 200, 31] * 9 + [99, 101]]
SERVED = {name: config for name, config in CONFIGS.items() if not name.startswith("hybrid")}  # that one is no plugin's
KINDS = {  # of memory, and of what ranks exchange: in turn tensor ranks and stages
    "tp": ["bamba_one_group", "jamba", "kimi_linear", "lfm2", "llama-odd-vocabulary", "minimax", "qwen3_next"],
    "pp": ["deepseek-v3", "falcon_h1", "gpt-oss", "longcat-flash", "mimo", "nemotron_h_moe", "ring"],
    "ep": ["deepseek-v2-lite-experts", "gpt-oss", "nemotron_h_moe"],
}
MESHES = {"tp": {"tp": 2}, "pp": {"pp": 2}, "ep": {"tp": 2, "ep": True}}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.load()


@pytest.fixture(scope="module")
def kept() -> Iterator[KeptRanks]:
    ranks = KeptRanks(1)
    yield ranks
    ranks.stop()


def options(**changes: object) -> EngineOptions:
    given = {**noise.OPTIONS, "device": "cpu", "dtype": "float32", "num_pages": 64, "num_threads": 1, "step_deadline": 20.0}
    return EngineOptions(**{**given, **changes})


def folder_of(tmp_path: Path, name: str) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SERVED[name]))
    return str(tmp_path)


def assert_equal(found: Mapping[str, Told], expected: Mapping[str, Told], *, within: float = 2e-5) -> None:
    """The same tokens; numbers within rounding. within: of log-probabilities."""
    assert {name: told.tokens for name, told in found.items()} == {name: told.tokens for name, told in expected.items()}
    for name, told in found.items():
        assert told.error is None
        for mine, theirs in zip(told.logprobs + told.prompt, expected[name].logprobs + expected[name].prompt, strict=True):
            if mine is None or theirs is None:
                assert mine is theirs
                continue
            assert mine.token_id == theirs.token_id
            assert math.isclose(mine.logprob, theirs.logprob, abs_tol=within)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        assert told.embedding == pytest.approx(expected[name].embedding, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        (name, mesh)
        for mesh, kinds in KINDS.items()
        for name in ((EXPERTS if mesh == "ep" else sorted(SERVED)) if EVERYTHING else kinds)
    ],
)
def test_two_processes_tell_what_one_tells(name: str, mesh: str, tmp_path: Path, registry: Registry, kept: KeptRanks) -> None:
    """Tensor ranks within rounding, stages bit for bit."""
    asked = options(model=folder_of(tmp_path, name), max_batch_tokens=32, page_size=4, num_pages=128, num_threads=1)
    requests = [request(str(index), prompt, logprobs=1) for index, prompt in enumerate(PROMPTS)]
    last = request("last", PROMPTS[0][::-1], logprobs=1)
    several = dataclasses.replace(asked, **MESHES[mesh])
    with running(asked, registry, kept) as engine:
        one, alone = serve(engine, requests), serve(engine, [last])
    with running(several, registry, kept) as engine:
        assert_equal(serve(engine, requests), one)
        if mesh == "pp":  # batches of several requests are put together otherwise
            assert serve(engine, [last])["last"].logprobs == alone["last"].logprobs


READ = test_mamba.FAMILIES | test_hybrids.HYBRIDS


@pytest.mark.parametrize(
    ("name", "ep"),
    [*((name, False) for name in sorted(READ)), *((name, True) for name in sorted(READ.keys() & set(EXPERTS)))]
    if EVERYTHING
    else [("bamba", False), ("qwen3_next", True)],
)
def test_ranks_read_their_slices_and_tell_what_transformers_tells(
    name: str, ep: bool, write_oracle: Callable[..., Oracle], registry: Registry, kept: KeptRanks
) -> None:
    """Of packed projections and convolutions, from a file; with `ep` only their own experts."""
    oracle = write_oracle(name, READ[name])
    asked = engine_driver.options(oracle, tp=2, ep=ep, num_threads=1, step_deadline=20.0)
    with running(asked, registry, kept) as engine:
        prompts = oracle.prompts[:3]
        engine_driver.assert_greedy(oracle, engine_driver.generate(engine, prompts), prompts)


ASKED = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 7},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 3},
    "seeded, with logprobs": {"temperature": 1.0, "seed": 1, "logprobs": 0},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {7: 4.0}},
}


@pytest.mark.parametrize("overlap", [False, True])
def test_whatever_is_asked_is_answered_alike(overlap: bool, registry: Registry, kept: KeptRanks) -> None:
    """All kinds of requests in one batch, in chunks; with overlap, tokens that the host does not know are inputs on both ranks."""
    asked = options(max_batch_tokens=24, overlap=overlap)
    requests = [
        request(f"{name} {place}", prompt, **params) for name, params in ASKED.items() for place, prompt in enumerate(PROMPTS)
    ]
    requests.append(request("embedding", PROMPTS[0], embed=True, max_tokens=1))
    one = on_ranks(asked, registry, kept, requests)
    two = on_ranks(dataclasses.replace(asked, tp=2), registry, kept, requests)
    assert len(one["embedding"].embedding) > 0
    assert sum(map(len, (told.prompt for told in one.values()))) == sum(map(len, PROMPTS))
    assert_equal(two, one)


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_and_aborted_requests_leave_both_ranks_alike(overlap: bool, registry: Registry, kept: KeptRanks) -> None:
    asked = options(num_pages=14, page_size=4, max_model_len=56, max_batch_tokens=16, overlap=overlap)
    requests = [request(str(index), prompt[:8], max_tokens=40) for index, prompt in enumerate(PROMPTS + PROMPTS)]
    again = request("again", PROMPTS[0][:8], max_tokens=40)
    one = on_ranks(asked, registry, kept, requests, aborts=["1", "5"])
    with running(dataclasses.replace(asked, tp=2), registry, kept) as engine:
        two = serve(engine, requests, aborts=["1", "5"])
        last = serve(engine, [again])["again"]
        assert engine.meter.stats().num_preempted > 0
    assert_equal(two, one)
    assert last.tokens == one["0"].tokens
    assert last.num_cached > 0


def test_drafts_are_verified_on_all_ranks(registry: Registry, kept: KeptRanks) -> None:
    """Greedy, sampled, and with log-probabilities."""
    asked = options(page_size=4, num_pages=128, drafter="lookup", draft_length="3")
    ways = [{}, {"logprobs": 1}, {"temperature": 0.7, "seed": 3}]
    requests = [request(f"{place} {way}", prompt, max_tokens=24, **way) for place, prompt in enumerate(PROMPTS) for way in ways]
    plain = on_ranks(dataclasses.replace(asked, drafter="off", draft_length="auto"), registry, kept, requests)
    with running(dataclasses.replace(asked, tp=2), registry, kept) as engine:
        two = serve(engine, requests)
        drafts = engine.meter.stats().drafts
    assert 0 < drafts.accepted < drafts.drafted
    assert_equal(two, plain)


def test_two_stages_of_two_ranks(registry: Registry) -> None:
    """Four processes; the layers are divided as asked, a long prompt in chunks fills the pipe."""
    asked = options(max_batch_tokens=16, num_threads=1)
    requests = [request(name, PROMPTS[0] * 3, **params) for name, params in ASKED.items()]
    one = serve(Engine.build(asked, registry), requests)
    engine = Engine.build(dataclasses.replace(asked, tp=2, pp=2, pp_layers="3,1"), registry)
    try:
        assert_equal(serve(engine, requests), one)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pp_layers": "5,1"}, "--pp-layers gives 2 stages of 5, 1 layers; the model has 4"),
        ({"drafter": "lookup"}, "--drafter lookup guesses.*with --pp 2 steps are on their way"),
        ({"overlap": True}, "overlap is on, but with --pp 2"),
        ({"pp_layers": "2"}, "pp_layers is '2', but must be a number of layers for each of the 2 stages"),
    ],
    ids=str,
)
def test_what_stages_cannot_do_is_refused(changes: dict[str, object], why: str, registry: Registry, kept: KeptRanks) -> None:
    with pytest.raises(EnginError, match=why), running(options(pp=2, **changes), registry, kept):
        pass


@pytest.mark.parametrize(("name", "kind"), [("qwen3_next", "state"), ("gpt-oss", "window")])
def test_a_stage_may_have_no_layer_of_a_kind_of_memory(
    name: str, kind: str, tmp_path: Path, registry: Registry, kept: KeptRanks
) -> None:
    """The last one has full attention alone: it has room for any number of other pages, and does not say how many there are."""
    changes = {"num_pages": None, "kv_memory_gib": 0.02, "max_model_len": 256, "page_size": 4, "max_batch_tokens": 32}
    asked = options(model=folder_of(tmp_path, name), **changes)
    requests = [request(str(index), prompt, logprobs=1) for index, prompt in enumerate(PROMPTS)]
    with running(asked, registry, kept) as engine:
        one = serve(engine, requests)
    with running(dataclasses.replace(asked, pp=2, pp_layers="3,1"), registry, kept) as engine:
        assert_equal(serve(engine, requests), one)
        assert_equal(serve(engine, requests), one)
        assert engine.meter.stats().pages[kind].cached > 0


@pytest.mark.parametrize(
    ("name", "mesh", "is_said"),
    [(MLA, {"tensor_size": 2}, True), (MLA, {"num_lanes": 2}, False), (MLA, {}, False), (MOE, {"tensor_size": 2}, False)],
    ids=str,
)
def test_where_each_rank_keeps_whole_latents_the_start_says_what_would_hold_more_tokens(
    name: str, mesh: dict[str, int], is_said: bool, tmp_path: Path, registry: Registry
) -> None:
    choice = choose(options(model=folder_of(tmp_path, name)), registry, parallel=ParallelFacts(**mesh))
    said = [decision for decision in choice.decisions if decision.setting == "latents"]
    assert [decision.value for decision in said] == ["whole on each rank"] * is_said
    assert all("--dp-attention 2 in place of --tp holds 2 times as many tokens" in decision.reason for decision in said)


def test_a_stage_without_any_memory_is_refused_by_name(tmp_path: Path, registry: Registry) -> None:
    asked = options(model=folder_of(tmp_path, "nemotron_h_moe"), pp=2)
    parallel = ParallelFacts(stage=1, num_stages=2, layers_by_stage=(4, 1))
    with pytest.raises(Unsupported, match="stage 1 has no layer with attention or a state; divide the layers otherwise, by --pp"):
        refuse_for_ranks(choose(asked, registry, parallel=parallel))


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "qwen3_next"])
def test_requests_come_and_go_while_steps_are_on_their_way(name: str, tmp_path: Path, registry: Registry, kept: KeptRanks) -> None:
    """Preempted, aborted, with cached beginnings; of every kind of memory."""
    changes = {"page_size": 4, "max_model_len": 56, "max_batch_tokens": 16, "num_threads": 1, "num_pages": 14}
    asked = options(model=folder_of(tmp_path, name), **changes)
    requests = [request(str(index), prompt[:8], max_tokens=40) for index, prompt in enumerate(PROMPTS + PROMPTS)]
    one = on_ranks(asked, registry, kept, requests, aborts=["1", "5"])
    with running(dataclasses.replace(asked, pp=2), registry, kept) as engine:
        two = serve(engine, requests, aborts=["1", "5"])
        again = serve(engine, [request("again", PROMPTS[0][:8], max_tokens=40)])["again"]
        stats = engine.meter.stats()
    assert_equal(two, one)
    assert again.tokens == one["0"].tokens
    assert stats.num_preempted > 0


def test_the_pipe_is_full(registry: Registry, kept: KeptRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams decode in turns, and one prompt's chunks follow each other without waiting."""
    most, unread, sizes = [], [], []
    with running(options(pp=2, max_batch_tokens=16), registry, kept) as engine:
        launch = engine._runner.launch

        def noted(step: StepInput) -> object:
            most.append(len(engine._sent))
            unread.append(len(engine._in_flight))
            sizes.append((step.phase, step.num_items))
            return launch(step)

        monkeypatch.setattr(engine._runner, "launch", noted)
        serve(engine, [request("long", [7] * 96, max_tokens=1)])
        assert most[:-1] == [2] * (len(most) - 1)
        assert unread == [0, 1, 1, 1, 1, 1], "a step amid a prompt is not waited for before the next one is launched"
        del most[:], unread[:], sizes[:]
        serve(engine, [request(name, [3, 4, 5], max_tokens=12) for name in "abcd"])
    assert not any(unread)
    decodes = [count for phase, count in sizes if phase is Phase.DECODE]
    assert decodes.count(2) > 0.7 * len(decodes)
    assert most.count(2) > 0.7 * len(most)


def test_a_model_drafts_on_both_processes(registry: Registry, kept: KeptRanks) -> None:
    """As on one: EAGLE's head, while the tokens of steps without guesses are on their way."""
    asked = embedded(drafter="eagle", draft_length="3", max_batch_tokens=96, overlap=True, step_deadline=20.0)
    ways = [{}, {"logprobs": 1}, {"temperature": 0.7, "seed": 3}]
    requests = [request(f"{at}", prompt_of(SAID[at]), max_tokens=16, **way) for at, way in enumerate(ways)]
    plain = on_ranks(dataclasses.replace(asked, drafter="off", draft_length="auto"), registry, kept, requests)
    with running(asked, registry, kept) as one:
        assert_equal(serve(one, requests), plain)
    with running(dataclasses.replace(asked, tp=2), registry, kept) as two:
        assert_equal(serve(two, requests), plain)
    drafts = two.meter.stats().drafts
    assert drafts == one.meter.stats().drafts
    assert drafts.accepted > 20


def test_a_module_drafts_for_a_hybrid_on_both_processes(
    module_of: Callable[..., Module], registry: Registry, kept: KeptRanks
) -> None:
    module = module_of("qwen3-next")
    asked = options(model=str(module.folder), load_format="auto", max_batch_tokens=24, page_size=4, num_pages=128)
    requests = [
        request(f"{at}", prompt[:30], max_tokens=10, temperature=0.8 * (at % 2), seed=at)
        for at, prompt in enumerate(module.oracle.prompts[1:4])
    ]
    plain = on_ranks(asked, registry, kept, requests)
    with running(dataclasses.replace(asked, tp=2, drafter="auto", draft_length="2"), registry, kept) as engine:
        assert_equal(serve(engine, requests), plain)
        assert engine.meter.stats().drafts.drafted > 20


def test_the_rank_with_the_least_memory_says_how_many_pages_there_are(registry: Registry, kept: KeptRanks) -> None:
    asked = options(num_pages=None, kv_memory_gib=0.01)
    one = Engine.build(asked, registry)
    with running(dataclasses.replace(asked, tp=2), registry, kept) as two:
        assert two.facts.num_pages in (2 * one.facts.num_pages, 2 * one.facts.num_pages + 1)  # each has half of the heads


@pytest.mark.parametrize("layers", ["1,3", "3,1"])
def test_of_stages_of_which_one_has_less_room_all_have_as_few_pages(layers: str, registry: Registry, kept: KeptRanks) -> None:
    """`--kv-memory-gib` is of each rank; the first rank is the last stage."""
    asked = options(num_pages=None, kv_memory_gib=0.01)
    one = Engine.build(asked, registry)
    with running(dataclasses.replace(asked, pp=2, pp_layers=layers), registry, kept) as two:
        assert two.facts.num_pages in (4 * one.facts.num_pages // 3, 4 * one.facts.num_pages // 3 + 1)  # of three of four layers
        serve(two, [request("a", [3, 4, 5], max_tokens=4)])


@pytest.mark.parametrize("changes", [{}, {"pp": 2}], ids=str)
def test_experts_are_not_divided_among_ranks_that_are_alone(changes: dict[str, object], registry: Registry) -> None:
    with pytest.raises(ConfigError, match="--ep divides experts among the ranks of a stage, but there is one; give --tp or --dp"):
        choose(options(ep=True, **changes), registry)


@pytest.mark.parametrize("mesh", [ParallelFacts(tensor_size=2, cuts_experts=True), ParallelFacts(num_lanes=2, cuts_experts=True)])
def test_experts_that_are_not_there_are_not_divided(mesh: ParallelFacts, tmp_path: Path, registry: Registry) -> None:
    asked = options(model=folder_of(tmp_path, "llama"))
    with pytest.raises(Unsupported, match=r"--ep divides experts among ranks, and .* has none; leave it out"):
        check_weights(choose(asked, registry, parallel=mesh))


def test_what_ranks_cannot_share_is_refused_by_name(registry: Registry, kept: KeptRanks) -> None:
    with pytest.raises(Unsupported, match=r"3 ranks cannot share.*2 or 4 ranks can"):
        Engine.build(options(tp=3), registry)


def test_a_rank_that_is_killed_amid_guesses_ends_the_engine(
    registry: Registry, kept: KeptRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, guess, calls = embedded(drafter="eagle", tp=2, step_deadline=20.0), DraftModel.guess, itertools.count()

    def killing(*given: Any) -> torch.Tensor:
        if next(calls) == 5:
            os.kill(int(re.findall(r"\d+", kept.name(1))[-1]), signal.SIGKILL)
        return guess(*given)

    with running(asked, registry, kept) as engine:
        monkeypatch.setattr(DraftModel, "guess", killing)
        began_s = time.monotonic()
        with pytest.raises(EngineDied, match=r"rank 1 .* was killed by SIGKILL"):
            serve(engine, [request("a", prompt_of(SAID[0]), max_tokens=40)])
    assert time.monotonic() - began_s < asked.step_deadline


def phases_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Phase, ...]]:
    """Of each step, what its lanes are at."""
    seen: list[tuple[Phase, ...]] = []
    launch = engine._runner.launch

    def noted(step: StepInput) -> object:
        seen.append(tuple(own.phase for own in step.lanes))
        return launch(step)

    monkeypatch.setattr(engine._runner, "launch", noted)
    return seen


def assert_whole(engine: Engine) -> None:
    """Of every lane each page is free or cached, and no request is left."""
    lanes = engine.meter.stats().lanes
    assert len(lanes) == 2
    for lane in lanes:
        assert (lane.num_running, lane.num_waiting) == (0, 0)
        for counts in lane.pages.values():
            assert counts.free + counts.cached == counts.total


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
    few = {"num_pages": 14, "page_size": 4, "max_model_len": 56, "max_batch_tokens": 16, "overlap": overlap}
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
