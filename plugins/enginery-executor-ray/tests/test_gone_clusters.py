"""A cluster that is not there, or not any more, ends a start or an engine with that cause: Ray itself would try for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from enginery.api import EnginError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("with_ray")]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that speaks to Ray, as a process has it that is connected to no cluster."""
    from enginery_executor_ray import placing

    monkeypatch.setattr(placing.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(placing, "_REACH_S", 0.5)
    monkeypatch.setattr(placing, "_LOOK_S", 0.05)
    return placing


@pytest.fixture
def gone() -> Iterator[threading.Event]:
    """Set at the end, so that no thread waits longer for a cluster that does not answer."""
    event = threading.Event()
    yield event
    event.set()


def not_called(*_: object, **__: object) -> None:
    raise AssertionError("Ray would try for ever")


def test_an_address_where_nobody_listens_is_said_before_ray_tries(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    monkeypatch.setattr(alone.ray, "init", not_called)
    with pytest.raises(EnginError, match=r"nothing has answered at RAY_ADDRESS 127.0.0.1:9 for 0.5 s: .*ray start --head"):
        alone.own_address()


@pytest.mark.parametrize("address", ["", "auto", "ray://127.0.0.1:9", "nonsense"])
def test_of_other_addresses_ray_says_what_is_wrong(address: str, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises."""

    def init(**_: object) -> None:
        raise RuntimeError("the head is not ready")

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(alone.ray, "init", init)
    with pytest.raises(EnginError, match=r"no Ray cluster to put ranks on \(the head is not ready\); start one"):
        alone.own_address()


def test_a_cluster_is_looked_for_before_anything_listens_whatever_address_is_asked_for(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the main thread: later it is that of the ranks, which Ray warns of."""
    from enginery_executor_ray.spec import RAY

    assert RAY.listen is not None
    monkeypatch.setattr(alone, "_connect", lambda: None)
    monkeypatch.setattr(alone.ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    assert (RAY.listen(None), RAY.listen("tcp://10.0.0.2:5550")) == ("tcp://10.0.0.1:0", "tcp://10.0.0.2:5550")

    def refuse() -> None:
        raise EnginError("there is none")

    monkeypatch.setattr(alone, "_connect", refuse)
    with pytest.raises(EnginError, match="there is none"):
        RAY.listen("tcp://10.0.0.2:5550")


def test_an_engine_whose_cluster_is_gone_ends_all_the_same(
    alone: Any, gone: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is lost, and Ray does not come back when it is told that its place is free."""
    from enginery_executor_ray.placing import RayRanks

    asked = threading.Event()

    def remove(_: object) -> None:
        asked.set()
        gone.wait(60)

    monkeypatch.setattr(alone, "remove_placement_group", remove)
    monkeypatch.setattr(alone, "_END_S", 0.3)
    monkeypatch.setattr(alone, "_Rank", SimpleNamespace(options=lambda **_: SimpleNamespace(remote=_Actor)))
    monkeypatch.setattr(alone, "PlacementGroupSchedulingStrategy", lambda *_: None)
    placed = alone._Placed(object(), SimpleNamespace(address="", key=""), [{"CPU": 1}])
    began_s = time.monotonic()
    RayRanks(SimpleNamespace(end=lambda grace_s: None), placed).end(grace_s=0.0)
    assert asked.is_set()
    assert time.monotonic() - began_s < 10
    asked.clear()
    placed.end()
    assert not asked.is_set(), "once"


def test_a_start_whose_cluster_goes_away_is_given_up(alone: Any, gone: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "placement_group", lambda *_, **__: gone.wait(60))
    monkeypatch.setattr(alone, "_ANSWER_S", 0.3)
    monkeypatch.setattr(alone, "_connect", lambda: None)
    plan = SimpleNamespace(joining=SimpleNamespace(), devices=("cpu",))
    with pytest.raises(EnginError, match=r"the Ray cluster has not answered for 0.3 s; ray status"):
        alone.place(plan)


class _Actor:
    """In place of one of Ray's, which runs for ever."""

    def __init__(self) -> None:
        self.run = SimpleNamespace(remote=lambda *_: object())
