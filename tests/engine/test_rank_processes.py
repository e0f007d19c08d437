"""Two processes, through gloo, tell what one tells: every family, and whatever is asked of an engine, but for lanes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from engine import prediction_modules
from engine.draft_models import SAID, embedded, prompt_of
from engine.heads_made import Module
from engine.rank_answers import ASKED, MLA, MOE, PROMPTS, SERVED, assert_equal, folder_of, options
from engine.rank_models import EXPERTS
from engine.rank_pair import KeptRanks, on_ranks, request, running, serve
from pairwise import EVERYTHING
from parity import engine_driver, test_hybrids, test_mamba
from parity.oracle import Oracle

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

module_of = prediction_modules.module_of  # a fixture
KINDS = {  # of memory, and of what ranks exchange: in turn tensor ranks and stages
    "tp": ["bamba_one_group", "jamba", "kimi_linear", "lfm2", "llama-odd-vocabulary", "minimax", "qwen3_next"],
    "pp": ["deepseek-v3", "falcon_h1", "gpt-oss", "longcat-flash", "mimo", "nemotron_h_moe", "ring"],
    "ep": ["deepseek-v2-lite-experts", "gpt-oss", "nemotron_h_moe"],
}
MESHES = {"tp": {"tp": 2}, "pp": {"pp": 2}, "ep": {"tp": 2, "ep": True}}


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


@pytest.mark.parametrize(("mesh", "overlap"), [("tp", False), ("tp", True), ("pp", False)])
def test_whatever_is_asked_is_answered_alike(mesh: str, overlap: bool, registry: Registry, kept: KeptRanks) -> None:
    """All kinds of requests in one batch, in chunks; with overlap, tokens that the host does not know are inputs on both ranks."""
    asked = options(max_batch_tokens=24, overlap=overlap)
    requests = [
        request(f"{name} {place}", prompt, **params) for name, params in ASKED.items() for place, prompt in enumerate(PROMPTS)
    ]
    requests.append(request("embedding", PROMPTS[0], embed=True, max_tokens=1))
    one = on_ranks(asked, registry, kept, requests)
    two = on_ranks(dataclasses.replace(asked, **MESHES[mesh]), registry, kept, requests)
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
        ({"pp_layers": "2"}, "pp_layers is '2', but --pp is 2; give layers for each stage"),
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


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_attention": 2}], ids=str)
def test_experts_whose_size_does_not_divide_are_divided_by_their_number(
    mesh: dict[str, int], tmp_path: Path, registry: Registry, kept: KeptRanks
) -> None:
    """As Qwen3-30B-A3B-FP8's on eight ranks: six blocks each."""
    (tmp_path / "config.json").write_text(json.dumps(SERVED["qwen3-moe"] | {"moe_intermediate_size": 33}))
    asked = options(model=str(tmp_path), page_size=4, num_pages=128)
    requests = [request(str(index), prompt, logprobs=1) for index, prompt in enumerate(PROMPTS)]
    one = serve(Engine.build(asked, registry), requests)
    assert_equal(on_ranks(dataclasses.replace(asked, ep=True, **mesh), registry, kept, requests), one)


@pytest.mark.parametrize("ep", [False, True])
def test_what_ranks_of_another_stage_cannot_share_is_refused_by_the_first(ep: bool, tmp_path: Path, registry: Registry) -> None:
    """The first of four layers is dense, and of the other stage."""
    (tmp_path / "config.json").write_text(json.dumps(SERVED["deepseek-v3"] | {"intermediate_size": 33}))
    mesh = ParallelFacts(tensor_size=2, num_stages=2, stage=1, cuts_experts=ep)
    with pytest.raises(Unsupported, match=r"the output of model\.layers\.0\.mlp\.gate_proj: 33, which 2 ranks cannot share"):
        check_weights(choose(options(model=str(tmp_path)), registry, parallel=mesh))


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


def test_after_ctrl_c_the_user_is_told_to_build_a_new_llm(
    registry: Registry, kept: KeptRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the traceback of Ctrl-C, and at the next call: nothing is run any more."""
    told = r"rank 0 \(process \d+\) broke: KeyboardInterrupt\(\), which ended the other ranks; build a new LLM"
    with running(options(tp=2), registry, kept) as engine:
        serve(engine, [request("a", PROMPTS[0])])
        monkeypatch.setattr(engine._runner.parts.model, "forward", Mock(side_effect=KeyboardInterrupt))
        kept.is_broken = True  # it waits for this one's part of the step
        with pytest.raises(KeyboardInterrupt) as interrupted:
            serve(engine, [request("b", PROMPTS[0])])
        assert re.fullmatch(told, "\n".join(interrupted.value.__notes__))
        with pytest.raises(EngineDied, match=told):
            serve(engine, [request("c", PROMPTS[0])])


def test_every_call_after_rank_0_broke_tells_the_same(registry: Registry, kept: KeptRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error is raised each time, and must not grow by notes of steps that did not run, nor by earlier calls' frames."""
    with running(options(tp=2), registry, kept) as engine:
        monkeypatch.setattr(engine._runner.parts.model, "forward", Mock(side_effect=RuntimeError("it has had enough")))
        kept.is_broken = True  # it waits for this one's part of the step
        with pytest.raises(RuntimeError) as broke:
            serve(engine, [request("a", PROMPTS[0])])
        assert [note[:10] for note in broke.value.__notes__] == ["in step 0 "]
        told = []
        for name in ("b", "c", "d"):
            with pytest.raises(EngineDied) as died:
                serve(engine, [request(name, PROMPTS[0])])
            assert died.value.__cause__ is None  # least of all itself
            told.append("".join(traceback.format_exception(died.value)))
        assert "broke: RuntimeError('it has had enough'), which ended the other ranks; build a new LLM" in told[0]
        assert "\nin step " not in told[0]
        assert told == [told[0]] * 3
