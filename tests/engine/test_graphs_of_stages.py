"""Decoding steps of pipeline stages as CUDA graphs, each stage's its own. Devices are simulated, stages are threads."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cuda_on_host import here
from engine.rank_answers import PROMPTS, assert_equal, folder_of
from engine.rank_models import RECURRENT
from engine.rank_pair import request, serve
from engine.rank_threads import DeviceThreadGroup
from engine.test_cuda_paths import FEW, every_kind, on_cuda, options, told_of

from enginery.engine.engine import Engine
from enginery.errors import Unsupported
from enginery.plugin.registry import Registry
from enginery.worker.paths.captured_step import Replayable
from enginery.worker.paths.cuda_capture import CudaCapture
from enginery.worker.ranks.stages import LinkedStage, StageGraph

TWO, FOUR = {"pp": 2}, {"tp": 2, "pp": 2}
FAMILIES: Mapping[str, Mapping[str, object]] = {  # of whose stages some have several kinds of memory, or experts, or hold latents
    "gpt-oss": TWO,
    "falcon_h1": TWO,
    "nemotron_h_moe": TWO,
    "gemma2": FOUR,
    "qwen3_next": TWO,
    "deepseek-v2-lite-experts": {**FOUR, "ep": True},
    "llama": {"pp": 3},
}


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each device's stage has replayed a graph."""
    found, replay = Counter[int](), StageGraph.replay

    def counting(graph: StageGraph) -> None:
        found[here.index] += 1
        replay(graph)

    monkeypatch.setattr(StageGraph, "replay", counting)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_tell_what_one_rank_tells(registry: Registry, tmp_path: Path, replayed: Counter[int], *, family: str) -> None:
    """Each rank of each stage replays as many graphs, with as many steps on their way as there are stages."""
    recurrent = {"linear_attention_backend": "linear"} if family in RECURRENT else {}
    asked, mesh = options(model=folder_of(tmp_path, family), **recurrent), FAMILIES[family]
    batches = [every_kind()[:1], every_kind(), every_kind()[1:3]]
    expected = told_of(Engine.build(asked, registry), batches)
    with on_cuda(dataclasses.replace(asked, **mesh), registry) as (engine, devices):
        for found, wanted in zip(told_of(engine, batches), expected, strict=True):
            assert_equal(found, wanted, within=1e-4)
        num_steps = engine.meter.stats().num_graph_steps
        assert num_steps > 20
        assert engine._runner.graphs is not None
        assert not engine._runner.graphs.waiting(), "nothing is captured when it is needed"
        assert not any(device.waits for device in devices)
    assert set(replayed.values()) == {num_steps}
    assert len(replayed) == dataclasses.replace(asked, **mesh).num_ranks  # type: ignore[arg-type]


def test_stages_of_bfloat16_are_captured(registry: Registry) -> None:
    """What an early stage leaves in place of hidden states has their dtype."""
    with on_cuda(options(pp=2, dtype="bfloat16"), registry) as (engine, _):
        told_of(engine, [every_kind()[:1]])
        assert engine.meter.stats().num_graph_steps > 5


@pytest.mark.parametrize("mesh", [TWO, FOUR])
def test_a_stage_far_ahead_of_the_next_overwrites_nothing(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, replayed: Counter[int], mesh: Mapping[str, object]
) -> None:
    """What is sent is read when the stage before has launched all that it was given; pages are few, and one request leaves."""
    asked = options(**FEW)
    requests = [request(str(index), [index, *prompt[:7]], max_tokens=40) for index, prompt in enumerate(PROMPTS)]
    expected = serve(Engine.build(asked, registry), requests, aborts=["3"])
    receive = DeviceThreadGroup.receive

    def late(group: DeviceThreadGroup, *given: Any) -> Any:
        with group.turns.given():
            time.sleep(0.005)
        return receive(group, *given)

    monkeypatch.setattr(DeviceThreadGroup, "receive", late)
    with on_cuda(dataclasses.replace(asked, **mesh), registry) as (engine, _):
        assert_equal(serve(engine, requests, aborts=["3"]), expected)
        assert engine.meter.stats().num_preempted > 0
        assert engine.meter.stats().num_graph_steps > 20
        engine._scheduler.check_idle()
    assert len(set(replayed.values())) == 1


@pytest.mark.parametrize("mesh", [TWO, FOUR])
@pytest.mark.parametrize("refused", ["first", "last", "late"])
def test_a_stage_that_cannot_be_captured_is_none_of_the_others_business(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, replayed: Counter[int], mesh: Mapping[str, object], refused: str
) -> None:
    """Of the first stage and of the last; and when some sizes are captured."""
    count = 2 * (mesh == FOUR) or 1  # ranks of a stage: the last one's devices come first
    devices = range(count) if refused == "last" else range(count, 2 * count)
    captures, capture = Counter[int](), CudaCapture.__call__

    def refusing(whole: CudaCapture, run: Callable[[], None]) -> Replayable:
        captures[here.index] += 1
        if here.index in devices and captures[here.index] > 2 * (refused == "late"):
            run()
            raise Unsupported("no graph of it")
        return capture(whole, run)

    monkeypatch.setattr(CudaCapture, "__call__", refusing)
    asked, batches = options(), [every_kind()[:1], every_kind()]
    expected = told_of(Engine.build(asked, registry), batches)
    with on_cuda(dataclasses.replace(asked, **mesh), registry) as (engine, _):
        for found, wanted in zip(told_of(engine, batches), expected, strict=True):
            assert_equal(found, wanted, within=1e-4)
        assert (engine.meter.stats().num_graph_steps > 20) == (refused != "last")
    assert set(replayed) == (set() if refused == "last" else set(range(count)))


def test_nothing_crosses_while_a_stage_captures(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first steps sent has arrived before any stage captures, however slow the next one is."""
    receive, outside, begun = DeviceThreadGroup.receive, LinkedStage.outside, threading.Event()

    def late(group: DeviceThreadGroup, *given: Any) -> Any:
        if not begun.is_set():
            with group.turns.given():
                time.sleep(0.002)
        return receive(group, *given)

    def beginning(stage: LinkedStage, capture: Any) -> Any:
        begun.set()
        return outside(stage, capture)

    monkeypatch.setattr(DeviceThreadGroup, "receive", late)
    monkeypatch.setattr(LinkedStage, "outside", beginning)
    with on_cuda(options(pp=2), registry) as (engine, _):
        assert engine._runner.graphs is not None
