"""What an engine does on CUDA devices alone: warming up, graphs, overlap, exchanges. Devices are simulated (`cuda_on_host`).

Tokens are those of one rank on the CPU, whatever is asked for; ranks are threads. What is simulated is torch: no kernel of a plugin
runs, and attention is `engine.captured_backends`'.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import noise
import pytest
from cuda_on_host import Device
from cuda_simulated import simulated
from engine import captured_backends, model_heads
from engine.captured_backends import EXPERTS, CapturedDecoding, CapturedTorch, CaptureFails, captured
from engine.draft_models import SAID, branching, prompt_of
from engine.heads_made import Eagle3
from engine.rank_answers import ASKED, PROMPTS, assert_equal, folder_of
from engine.rank_models import RECURRENT
from engine.rank_pair import Told, request, serve
from engine.rank_threads import on_threads
from engine.small_pair import small_model
from engine.test_combs import shuffled
from engine.test_speculation import Scripted, with_drafter
from pairwise import in_turn
from parity.oracle import Oracle

from enginery.config.schema import EngineOptions
from enginery.contracts.batch import ForwardBatch, Phase
from enginery.contracts.ops import OpSpec
from enginery.contracts.request import GenerationRequest
from enginery.contracts.step import StepInput
from enginery.engine import build as build_module
from enginery.engine import changeover as changeover_module
from enginery.engine.engine import Engine
from enginery.engine.recording import read_recording
from enginery.engine.replay import build_replica, compare_tokens, replay_options
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery.worker.drafts.draws import DRAW_KINDS
from enginery.worker.paths.path import Forwarded

Forward = Callable[[StepInput, ForwardBatch], Forwarded]
llama_of_six = model_heads.llama  # a fixture
MESHES: Mapping[str, Mapping[str, object]] = {
    "one": {},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "lanes": {"dp_attention": 2},
    "tp pp": {"tp": 2, "pp": 2},
    "lanes pp": {"dp_attention": 2, "pp": 2},
}
FEW: Mapping[str, object] = {"num_pages": 20, "max_model_len": 48, "max_batch_tokens": 16, "max_batch_requests": 6}


def options(**changes: object) -> EngineOptions:
    given = {"device": "cpu", "dtype": "float32", "attention_backend": "torch", "num_threads": 1, "page_size": 4, "num_pages": 128}
    sizes = {"max_batch_requests": 6, "max_batch_tokens": 40, "max_model_len": 64}
    return EngineOptions(**{**noise.TWO_LAYERS, **given, **sizes, **changes})


@contextmanager
def on_cuda(
    asked: EngineOptions, registry: Registry, *, ops: Sequence[Offer[OpSpec]] = (EXPERTS,)
) -> Iterator[tuple[Engine, list[Device]]]:
    """The same engine where there are GPUs, of so many ranks as are asked for. ops: instead of the references."""
    with simulated() as devices:
        asked, registry = dataclasses.replace(asked, device="cuda"), captured(registry, ops)
        if asked.num_ranks > 1:
            with on_threads(asked, registry) as (engine, _):
                yield engine, devices
        else:
            engine = Engine.build(asked, registry)
            yield engine, devices
            engine.close()


def every_kind() -> list[GenerationRequest]:
    """Some begin alike; each is in one batch with the others."""
    return [request(f"{way} {place}", PROMPTS[place % 4], **ASKED[way]) for place, way in enumerate((*ASKED, "greedy"))]


def told_of(engine: Engine, batches: list[list[GenerationRequest]], **more: object) -> list[dict[str, Told]]:
    return [serve(engine, batch, **more) for batch in batches]  # type: ignore[arg-type]


@in_turn(
    ("mesh", MESHES),
    ("family", ["llama", "lfm2", "deepseek-v2-lite-experts", "gpt-oss", "gemma2", "mamba2"]),
    ("changes", [{}, {"micro_batches": True}, {"check_attention": True}, {"prefix_cache": False}, {"overlap": False}]),
)
def test_every_request_is_told_what_a_cpu_tells(
    registry: Registry, tmp_path: Path, *, mesh: str, family: str, changes: dict[str, object]
) -> None:
    """Alone, together, and again, when all that can be captured is."""
    several = {**MESHES[mesh], "ep": "experts" in family and ("tp" in mesh or "lanes" in mesh)}
    if "lanes" in mesh or "pp" in mesh:
        changes = {name: value for name, value in changes.items() if name not in ("micro_batches", "overlap")}
    recurrent = {"linear_attention_backend": "linear"} if family in RECURRENT else {}
    asked, batches = options(model=folder_of(tmp_path, family), **recurrent), [every_kind()[:1], every_kind()]
    expected = told_of(Engine.build(asked, registry), batches)
    with on_cuda(dataclasses.replace(asked, **changes, **several), registry) as (engine, devices):
        found = told_of(engine, batches)
        captures, pieces = engine._runner.graphs is not None, engine._runner.pieces
        while engine.prepare():
            pass
        found += told_of(engine, batches[1:])
        assert captures == ("check_attention" not in changes)
        assert (engine.meter.stats().num_graph_steps > 20) == captures
        assert (pieces is not None) == (captures and mesh in ("one", "tp"))
        assert pieces is None or pieces._kinds[0] == (family not in RECURRENT)
        if "check_attention" not in changes:
            assert not any(device.waits for device in devices), "the host waits for results alone"
    for each, wanted in zip(found, expected + expected[1:], strict=True):
        assert_equal(each, wanted, within=1e-4)


@pytest.mark.parametrize("changes", [{}, {"tp": 2}, {"overlap": False}, {"dp_attention": 4}])
def test_lanes_with_more_and_fewer_requests_and_with_none(registry: Registry, tmp_path: Path, changes: dict[str, object]) -> None:
    """Each alone, so that other lanes run a graph of padding, then as many as there are places."""
    asked = options(model=folder_of(tmp_path, "deepseek-v2-lite-experts"))
    several: dict[str, object] = {"dp_attention": 2, "ep": True, **changes}
    every = every_kind()
    batches = [every[:1], every[1:2], every, every[:3]]
    expected = told_of(Engine.build(asked, registry), batches)
    with on_cuda(dataclasses.replace(asked, **several), registry) as (engine, devices):
        graphs = engine._runner.graphs
        assert graphs is not None
        assert not graphs.waiting(), "nothing is left for idle moments, in which other ranks would not take part"
        for found, wanted in zip(told_of(engine, batches), expected, strict=True):
            assert_equal(found, wanted, within=1e-4)
        assert engine.meter.stats().num_graph_steps > 20
        assert not any(device.waits for device in devices)


def test_lanes_say_that_one_has_more_requests_than_the_largest_graph(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("enginery.config.resolve.MAX_GRAPH_REQUESTS", 2)
    asked = options(model=folder_of(tmp_path, "deepseek-v2-lite-experts"), dp_attention=2, ep=True)
    with on_cuda(asked, registry) as (engine, _):
        told_of(engine, [[request(f"{place}", PROMPTS[0], max_tokens=8) for place in range(4)]])
        assert "decoded eagerly" not in caplog.text
        told_of(engine, [[request(f"{place}", PROMPTS[0], max_tokens=8) for place in range(6)]])
    assert "3 requests are decoded eagerly: graphs are for up to 2" in caplog.text


@in_turn(("mesh", ["one", "tp", "lanes", "lanes pp", "pp", "tp pp"]), ("kv_dtype", ["auto", "fp8"]))
def test_preemption_and_aborts(registry: Registry, mesh: str, kv_dtype: str) -> None:
    asked = options(**FEW, kv_dtype=kv_dtype)
    requests = [request(str(index), [index, *prompt[:7]], max_tokens=40) for index, prompt in enumerate(PROMPTS)]
    expected = serve(Engine.build(asked, registry), requests, aborts=["3"])
    with on_cuda(dataclasses.replace(asked, **MESHES[mesh]), registry) as (engine, _):
        assert_equal(serve(engine, requests, aborts=["3"]), expected)
        assert engine.meter.stats().num_preempted > 0
        engine._scheduler.check_idle()


@in_turn(
    ("mesh", ["tp", "tp", "one"]),
    ("kind", ["lookup", "random", "right", "some", "wrong"]),
    ("length", ["3", "1", "3", "auto"]),
    ("family", ["llama", "lfm2"]),
    ("changes", [{}, {}, {"overlap": False}, FEW]),
)
def test_what_a_drafter_of_the_host_guesses_is_verified_in_graphs(
    registry: Registry, tmp_path: Path, *, mesh: str, kind: str, length: str, family: str, changes: dict[str, object]
) -> None:
    """Of a request alone, and of some together, for some of which it may guess nothing."""
    recurrent = {"linear_attention_backend": "linear"} if family in RECURRENT else {}
    asked = options(model=folder_of(tmp_path, family), **{"max_batch_requests": 12, **changes}, **recurrent)
    reported = {"logprobs": 2, "prompt_logprobs": 1}
    ways = [{}, {}, {"temperature": 0.9, "top_p": 0.95, "seed": 7}, reported, {"repetition_penalty": 1.3}]
    requests = [request(f"{at}", [at, *PROMPTS[at % 4][:20]], max_tokens=24, **way) for at, way in enumerate(ways)]
    expected = serve(Engine.build(asked, registry), requests)
    if kind != "lookup":
        answers = {each.prompt_token_ids: expected[each.request_id].tokens for each in requests}
        registry = with_drafter(registry, lambda _: Scripted(kind, answers))
    drafter = "lookup" if kind == "lookup" else "scripted"
    with on_cuda(dataclasses.replace(asked, drafter=drafter, draft_length=length, **MESHES[mesh]), registry) as (engine, devices):
        graphs, replayed = engine._runner.graphs, replayed_by(engine)
        assert graphs is not None
        assert engine._drafting is not None
        engine._drafting._clock = partial(next, itertools.count())  # all steps take as long, so what is found pays
        for batch in (requests[:1], requests, requests[1:3]):
            assert_equal(serve(engine, batch), {each.request_id: expected[each.request_id] for each in batch}, within=1e-4)
        if kind == "lookup" and family in RECURRENT:
            return  # its random text repeats nothing, so nothing is guessed
        drafts, keys = engine.meter.stats().drafts, graphs.captured
        assert (drafts.accepted > 0, drafts.accepted < drafts.drafted) == (kind != "wrong", kind not in ("right", "some"))
        measured = length == "auto"  # a load has plain steps first, so none verifies beside the prompts that it begins with
        assert sum(step.verifies for step in replayed) - beside_prompts(replayed) > (4 if measured else 5)
        assert beside_prompts(replayed) or kind == "lookup" or changes is FEW or measured
        assert len([key for key in keys if key.length > 1]) > 1, "captured when the engine was built, and when needed"
        assert not any(device.waits for device in devices)


def replayed_by(engine: Engine) -> list[StepInput]:
    """The steps that it runs as graphs from now on, whole or in pieces."""
    found: list[StepInput] = []

    def noting(forward: Forward, step: StepInput, batch: ForwardBatch) -> Forwarded:
        found.append(step)
        return forward(step, batch)

    for path in (engine._runner.graphs, engine._runner.pieces):
        assert path is not None
        path.forward = partial(noting, path.forward)  # type: ignore[method-assign]
    return found


def beside_prompts(steps: Sequence[StepInput]) -> int:
    """How many of them verify guesses beside prompts."""
    return sum(step.verifies and step.phase is Phase.MIXED for step in steps)


def by_itself(**changes: object) -> EngineOptions:
    """A model that drafts for itself: all guesses are right of tokens that are the likeliest, or drawn."""
    asked = options(**changes)
    return dataclasses.replace(asked, drafter="standalone", draft_model=asked.model)


@in_turn(("mesh", ["one", "tp"]), ("length", ["2", "3"]), ("changes", [{}, FEW, {"graphs": False, "overlap": False}]))
def test_as_many_guesses_are_right_as_on_a_cpu(registry: Registry, *, mesh: str, length: str, changes: dict[str, object]) -> None:
    """Where the host knows lengths, and what is guessed, before the next step is scheduled."""
    requests = [each for each in every_kind() if "logprobs" not in each.request_id and not each.embed]
    requests = [dataclasses.replace(each, prompt_token_ids=each.prompt_token_ids[:20]) for each in requests]
    asked = dataclasses.replace(by_itself(**changes), draft_length=length)
    here = Engine.build(asked, registry)
    expected, wanted = serve(here, requests), here.meter.stats().drafts
    assert wanted.accepted > 3
    with on_cuda(dataclasses.replace(asked, **MESHES[mesh]), registry) as (engine, devices):
        replayed = replayed_by(engine) if "graphs" not in changes else []
        assert_equal(serve(engine, requests), expected)
        assert engine.meter.stats().drafts == wanted
        assert beside_prompts(replayed) or changes
        assert (engine._runner._draft_graphs is not None) == ("graphs" not in changes)
        assert not any(device.waits for device in devices)


@in_turn(("mesh", ["tp", "one"]), ("drafter", ["eagle", "standalone", "eagle3"]), ("length", ["3", "2", "2"]))
def test_a_draft_model_changes_no_token(
    llama_of_six: Oracle, registry: Registry, tmp_path: Path, *, mesh: str, drafter: str, length: str
) -> None:
    """Requests that draw their tokens, and one that is not drafted for, are alone and among others."""
    sizes = {"max_model_len": 128, "max_batch_requests": 12, "max_batch_tokens": 64, "num_pages": 120, "overlap": None}
    prompts = [prompt_of(said) for said in SAID[:5]]
    if drafter == "eagle3":
        head = {"drafter": drafter, "draft_model": str(Eagle3(own=97).write(tmp_path))}
        asked = model_heads.options(llama_of_six.folder, attention_backend="torch", **sizes, **head)
        prompts = [tuple(prompt[:30]) for prompt in llama_of_six.prompts[1:6]]
    else:
        asked = small_model(attention_backend="torch", drafter=drafter, **sizes)
    if drafter == "standalone":
        asked = dataclasses.replace(asked, draft_model=asked.model)  # by itself, so that it is always right
    ways = [{}, {"logprobs": 1, "prompt_logprobs": 1}, {"temperature": 0.7, "seed": 3}, {"speculation": False}, {}]
    requests = [request(f"{at}", prompts[at], max_tokens=16, **way) for at, way in enumerate(ways)]
    expected = serve(Engine.build(dataclasses.replace(asked, drafter="off", draft_model=None), registry), requests)
    with on_cuda(dataclasses.replace(asked, draft_length=length, **MESHES[mesh]), registry) as (engine, devices):
        replayed, waits = replayed_by(engine), [device.waits for device in devices]
        for batch in (requests[:2], requests, requests[2:3]):
            assert_equal(serve(engine, batch), {each.request_id: expected[each.request_id] for each in batch}, within=1e-4)
        drafts, graphs = engine.meter.stats().drafts, engine._runner._draft_graphs
        assert drafts.drafted > 0
        assert drafts.accepted > 0 or drafter == "eagle3", "whose weights are random: a right guess is luck"
        assert (drafts.accepted < drafts.drafted) == (drafter != "standalone")
        assert sum(step.verifies for step in replayed) - beside_prompts(replayed) > 5
        assert beside_prompts(replayed)
        assert graphs is not None
        assert len(graphs._follows) > 1, "captured when the engine was built, and when needed"
        drawn = {kind for _, _, kind in graphs._steps} - {None}
        assert len(drawn) == (len(DRAW_KINDS) if mesh == "tp" else 1), "ranks that do not know which one it is have them all"
        assert [device.waits for device in devices] == waits


def test_guesses_that_branch_are_verified_beside_prompts(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, where each row sees those on its way alone: what would be said is beside the guess."""
    requests = [request(f"{at}", PROMPTS[at][:20], max_tokens=16) for at in range(4)]
    asked = dataclasses.replace(by_itself(max_batch_requests=64), draft_length="3")
    expected = serve(Engine.build(asked, registry), requests)
    shuffled(monkeypatch, "beside")
    with on_cuda(asked, branching(registry, "standalone")) as (engine, devices):
        replayed = replayed_by(engine)
        assert_equal(serve(engine, requests), expected)
        assert [step for step in replayed if step.parents and step.phase is Phase.MIXED]
        drafts = engine.meter.stats().drafts
        assert drafts.accepted > 0.5 * drafts.verifications
        assert not any(device.waits for device in devices)


@pytest.mark.parametrize("rate", [0.0, 1.0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_acceptance_is_forced_behind_graphs(registry: Registry, ranks: int, rate: float) -> None:
    """Within those of decoding steps where there is one rank, else behind them."""
    sizes = {"max_model_len": 128, "max_batch_requests": 6, "max_batch_tokens": 64, "num_pages": 100}
    asked = small_model(attention_backend="torch", drafter="eagle", draft_length="2", tp=ranks, **sizes)
    with simulated():
        asked, registry = dataclasses.replace(asked, device="cuda"), captured(registry)
        with on_threads(asked, registry, forced_rates=[rate, rate]) as (engine, _):
            replayed = replayed_by(engine)
            serve(engine, [request(f"{at}", prompt_of(SAID[at]), max_tokens=16) for at in range(2)])
            drafts = engine.meter.stats().drafts
            assert sum(step.verifies for step in replayed) > 4
            assert drafts.accepted == rate * drafts.drafted


@pytest.mark.parametrize(
    ("chosen_backend", "drafts"),
    [(CapturedTorch, False), (CapturedTorch, True), (CapturedDecoding, False), (CaptureFails, False), (CaptureFails, True)],
)
def test_a_changeover_amid_requests(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, chosen_backend: type, drafts: bool
) -> None:
    """What was captured of the first backends is captured anew of the others; of the first, if the others fail."""
    go_on, choose = threading.Event(), build_module.choose

    class Compiling:
        def __init__(self, *given: object) -> None: ...

        def wait(self) -> None:
            go_on.wait()

        def stop(self) -> None:
            go_on.set()

    def chosen(*given: object, **named: object) -> object:
        choice = choose(*given, **named)  # type: ignore[arg-type]
        return dataclasses.replace(choice, first_attention=choice.attention)

    asked, requests = options(), every_kind()
    expected = serve(Engine.build(asked, registry), requests)
    monkeypatch.setattr(changeover_module, "CompileProcess", Compiling)
    monkeypatch.setattr(build_module, "choose", chosen)
    with on_cuda(dataclasses.replace(by_itself(), draft_length="2") if drafts else asked, registry) as (engine, _):
        changeover, step, turns = engine._changeover, engine.step, iter(range(1000))
        assert changeover is not None

        def stepping() -> object:
            if next(turns) == 5:
                monkeypatch.setattr(captured_backends, "CapturedTorch", chosen_backend)
                go_on.set()
                until_s = time.monotonic() + 20
                while not changeover.is_ready:
                    assert time.monotonic() < until_s, changeover.state
                    time.sleep(0.01)
            return step()

        monkeypatch.setattr(engine, "step", stepping)
        first, relay = serve(engine, requests), engine._runner.parts.relay
        steps = (*engine._runner.graphs.captured.values(), *engine._runner.pieces._captured.values())
        plans = [step.batch.plan for step in steps if step.batch.plan is not None]
        assert {plan.key.backend for plan in plans} == {relay.backend_id}, "captured anew"
        assert not changeover.is_ready, "it was changed over"
        assert changeover.state.failure == ("RuntimeError: no room" if chosen_backend is CaptureFails else "")
        while engine.prepare():
            pass
        for found in (first, serve(engine, requests)):
            assert_equal(found, expected)


@pytest.mark.parametrize("mesh", ["tp", "lanes", "lanes pp", "pp"])
def test_recorded_steps_are_the_same_on_one_device_and_on_a_cpu(registry: Registry, tmp_path: Path, mesh: str) -> None:
    """Of captured steps, too, and of those that were launched before the one in front of them was told."""
    asked = options(record_steps=(9, str(tmp_path / "steps")), **MESHES[mesh])
    with on_cuda(asked, registry) as (engine, _):
        serve(engine, every_kind())
    made = read_recording(tmp_path / "steps")
    assert len(made.steps) == 9
    with simulated():
        there = build_replica(replay_options(made, None), captured(registry), made)
        assert compare_tokens(made, there, tolerance=1e-4).parting is None
    here = build_replica(replay_options(made, None, device="cpu"), registry, made)
    assert compare_tokens(made, here, tolerance=1e-4).parting is None


@pytest.mark.parametrize("mesh", ["one", "tp", "lanes"])
def test_experts_in_plain_torch_run_eagerly(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture, mesh: str
) -> None:
    """They ask the device which experts are used, which ends a capture; as where no kernels take the experts' weights."""
    asked, requests = options(model=folder_of(tmp_path, "qwen3-moe")), every_kind()[:2]
    expected = serve(Engine.build(asked, registry), requests)
    with on_cuda(dataclasses.replace(asked, **MESHES[mesh]), registry, ops=()) as (engine, _):
        assert_equal(serve(engine, requests), expected)
        assert engine.meter.stats().num_graph_steps == 0
    assert "all steps run eagerly, which makes decoding slow: experts in plain torch wait for the device" in caplog.text
