"""Ranks that Ray places tell what one process tells, and what Ray does to them is told."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from enginery import LLM, SamplingParams
from enginery.api import ConfigError, EnginError, Joining, LaunchPlan, PluginError, RunningRanks
from enginery.testing.fixtures import write_tiny_checkpoint

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
PROMPTS = [[5, 77, 200, 31] * 9, [8, 9, 140]]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    return {"model": str(model), "load_format": "dummy", "device": "cpu", "dtype": "float32", "num_pages": 64, "num_threads": 1}


def tokens(llm: LLM) -> list[list[int]]:
    return [list(done.token_ids) for done in llm.generate(PROMPTS, GREEDY)]


def members() -> list[psutil.Process]:
    """The processes of `engine rank` that Ray runs here."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if {"rank", "--join"} <= set(process.info["cmdline"] or ()):
            found.append(process)
    return found


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_ranks_that_ray_places_tell_what_one_process_tells(options: dict[str, object]) -> None:
    with LLM(**options) as llm:
        one = tokens(llm)
    before = members()
    with LLM(**options, tp=2, executor="ray") as llm:
        (member,) = (process for process in members() if process not in before)
        assert "ray::" in (member.parent().name() + " ".join(member.parent().cmdline()))
        assert "CUDA_VISIBLE_DEVICES" not in member.environ(), "no GPU is kept from others"
        assert tokens(llm) == one
    assert not psutil.wait_procs([member], timeout=10)[1]


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_rank_that_computes_on_a_gpu_has_one_to_itself(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ray's count; there is none here, and the rank computes on its CPU all the same."""
    from enginery_executor_ray import placing

    made = placing.place

    def on_gpus(plan: LaunchPlan) -> RunningRanks:
        assert plan.devices == ("cpu",)
        return made(dataclasses.replace(plan, devices=("cuda",)))

    monkeypatch.setattr(placing, "place", on_gpus)
    before = members()
    with LLM(**options, tp=2, executor="ray"):
        (member,) = (process for process in members() if process not in before)
        assert member.environ()["CUDA_VISIBLE_DEVICES"] in "0123"


@pytest.fixture
def full(cluster: None) -> Iterator[None]:
    """All of the cluster's processors are taken."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([{"CPU": 8}])
    assert group.wait(60)
    yield
    remove_placement_group(group)


@pytest.mark.ray
@pytest.mark.usefixtures("full")
def test_where_ray_has_no_room_it_is_said_soon_and_ends_the_start_later(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from enginery_executor_ray import placing

    monkeypatch.setattr(placing, "_SOON_S", 1.0)
    monkeypatch.setattr(placing, "_PLACE_S", 3.0)
    with caplog.at_level(logging.WARNING), pytest.raises(placing.NoRoom, match=r"no room for 1 rank of one CPU in 3 s; ray status"):
        LLM(**options, tp=2, executor="ray").close()
    (said,) = (record.message for record in caplog.records if "no room" in record.message)
    assert said == "Ray has no room yet for 1 rank of one CPU; it has 3 s for it, and ray status tells what it has"


@pytest.mark.ray
@pytest.mark.usefixtures("full")
def test_who_interrupts_a_start_does_not_wait_for_room(options: dict[str, object]) -> None:
    """It took the rest of two minutes. Nothing is asked of Ray any more then."""
    from ray.util import placement_group_table

    threading.Timer(3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        LLM(**options, tp=2, executor="ray").close()
    assert time.monotonic() - began_s < 20
    assert "PENDING" not in {group["state"] for group in placement_group_table().values()}


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_an_actor_that_is_killed_ends_the_engine_with_that_cause(options: dict[str, object]) -> None:
    before = members()
    with LLM(**options, tp=2, executor="ray", step_deadline=20.0) as llm:
        (member,) = (process for process in members() if process not in before)
        threading.Timer(0.3, member.parent().kill).start()
        began_s = time.monotonic()
        with pytest.raises(EnginError, match=r"rank 1 \(.*\) was lost"):
            llm.generate([[7, 8, 9]] * 1000, SamplingParams(max_tokens=48, ignore_eos=True, temperature=0))
        assert time.monotonic() - began_s < 15
    assert not psutil.wait_procs([member], timeout=10)[1]


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_rank_that_cannot_begin_is_told_at_once(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a deadline."""
    from enginery_executor_ray import placing

    made = placing._Placed

    def with_another_key(group: object, joining: Joining, needs: list[dict[str, float]]) -> object:
        return made(group, SimpleNamespace(address=joining.address, key="0" * 64), needs)

    monkeypatch.setattr(placing, "_Placed", with_another_key)
    with pytest.raises(EnginError, match=r"(?s)rank 1 ended with exit code 2, before it joined.*refused the key"):
        LLM(**options, tp=2, executor="ray").close()


def test_without_ray_it_says_what_to_install(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else find(name, *more))
    with pytest.raises(PluginError, match=r"--executor ray needs Ray; pip install 'enginery-executor-ray\[ray\]'"):
        LLM(**options, tp=2, executor="ray")


def test_one_rank_needs_no_ray(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="executor is 'ray', but there is one rank"):
        LLM(**options, executor="ray")
