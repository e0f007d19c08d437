"""What places the processes of ranks is an offer of plugins, asked for by `--executor`."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import noise
import psutil
import pytest
import zmq
from engine.rank_pair import request, serve
from installed import install

from enginery.config.schema import EngineOptions
from enginery.contracts.parallel import Death, ExecutorSpec, LaunchPlan
from enginery.engine.engine import Engine
from enginery.engine.ranks import messages
from enginery.engine.ranks.driver import _of_one_rank
from enginery.engine.ranks.keys import RankKey
from enginery.engine.ranks.local import COMMAND, LocalRanks
from enginery.engine.ranks.watch import Watch
from enginery.engine.ranks.wires import wires_of
from enginery.errors import ConfigError, EngineDied, EnginError, PluginError
from enginery.plugin.registry import Registry
from enginery.worker.ranks.gloo import Standing

PLUGIN = """
from enginery.api import ExecutorSpec, hookimpl

def wrapped(plan):
    return plan.start([("env", f"PLACED_AS={rank} {plan.devices}", *plan.command) for rank in range(1, plan.num_others + 1)])

def broken(plan):
    raise ValueError("no room for ranks")

@hookimpl
def register_executors():
    return [
        ExecutorSpec(name="wrapped", api=(2, 0), launch=wrapped, summary="behind a command"),
        ExecutorSpec(name="empty", api=(2, 0), launch=lambda plan: None, summary="nothing"),
        ExecutorSpec(name="broken", api=(2, 0), launch=broken, summary="not at all"),
    ]
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """With a plugin that is installed: ranks find it by its entry point as this process does."""
    install(tmp_path, "placing", "placing_plugin", PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return Registry.load()


def options(**changes: object) -> EngineOptions:
    given = {**noise.OPTIONS, "device": "cpu", "dtype": "float32", "num_pages": 64, "num_threads": 1, "step_deadline": 20.0}
    return EngineOptions(**{**given, "tp": 2, **changes})


def test_a_plugin_s_executor_is_found_and_starts_the_ranks(registry: Registry) -> None:
    before = set(psutil.Process().children(recursive=True))
    engine = Engine.build(options(executor="wrapped"), registry)
    try:
        (rank,) = (child for child in set(psutil.Process().children(recursive=True)) - before if "PLACED_AS" in child.environ())
        assert rank.environ()["PLACED_AS"] == "1 ('cpu',)"
        assert rank.cmdline()[-1] == "enginery.engine.ranks.process"
        assert len(serve(engine, [request("a", [7, 8, 9])])["a"].tokens) == 8
    finally:
        engine.close()
    assert not rank.is_running()


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_what_a_dead_rank_wrote_comes_once_and_before_its_cause(is_elsewhere: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The cause is one line, for clients get it too."""
    command = [sys.executable, "-c", "import sys; print('a word', file=sys.stderr); sys.exit(3)"]

    def launch(plan: LaunchPlan) -> LocalRanks:
        return LocalRanks([command], is_elsewhere=is_elsewhere)

    reports = zmq.Context.instance().socket(zmq.PULL)
    reports.bind(f"inproc://reports-of-nobody-{is_elsewhere}")  # an address is free again some time after its end
    watch = Watch(launch, ["cpu"], reports=reports, deadline_s=20.0, standing=Standing(), joining=None)
    try:
        with pytest.raises(EngineDied, match=r"^rank 1 \(process \d+\) ended with exit code 3, in [^\n]+$"):
            watch.wait_for(messages.Here)
    finally:
        watch.end(grace_s=0.0)
    assert capsys.readouterr().err == "rank 1: a word\n" * (1 + is_elsewhere)  # here both are one stderr


def test_a_rank_ends_with_its_stdin_whoever_its_parent_is() -> None:
    """An executor may start it in a process of its own, whose end the kernel does not tell the rank."""
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        try:
            assert process.wait(50) == 0
        finally:
            process.kill()


def test_ranks_that_do_not_end_are_waited_for_together() -> None:
    """As where a start is refused while they import torch: twelve took two seconds each."""
    ranks = LocalRanks([[sys.executable, "-c", "import time; time.sleep(60)"]] * 4)
    began_s = time.monotonic()
    ranks.end(grace_s=1.0)
    assert 1.0 <= time.monotonic() - began_s < 3.0
    assert len(ranks.poll()) == 4


def test_what_a_rank_that_lost_another_said_is_told_where_no_other_broke() -> None:
    """As where two ranks do not reach each other."""
    reports, rank = (zmq.Context.instance().socket(kind) for kind in (zmq.PULL, zmq.PUSH))
    reports.bind("inproc://reports-of-the-lost")
    rank.connect("inproc://reports-of-the-lost")
    said = messages.Failed(rank=1, message="they did not meet\nand more", exit_code=1, is_ours=True, is_lost=True)
    rank.send(messages.encode(said))
    command = [sys.executable, "-c", "raise SystemExit(1)"]
    watch = Watch(lambda plan: LocalRanks([command]), ["cpu"], reports=reports, deadline_s=20.0, standing=Standing(), joining=None)
    try:
        with pytest.raises(EngineDied, match=r"^rank 1 \(process \d+\) ended with exit code 1, in .+: they did not meet$"):
            watch.wait_for(messages.Here)
    finally:
        watch.end(grace_s=0.0)
        rank.close(linger=0)


class HeldRanks:
    """Implements `RunningRanks` by one rank that is dead, whose executor does not come back while it ends what it placed."""

    def __init__(self, death: Death) -> None:
        self._deaths = [death]
        self.ends, self.may_end = threading.Event(), threading.Event()

    def boot(self, rank: int, frame: bytes) -> None:
        pass

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def poll(self) -> list[Death]:
        return [self._deaths.pop()] if self._deaths else []

    def dump_stacks(self) -> None:
        pass

    def end(self, *, grace_s: float) -> None:
        self.ends.set()
        assert self.may_end.wait(30)
        raise OSError("the cluster is gone")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_cause_is_told_before_the_executor_has_ended_what_it_placed() -> None:
    """As where a cluster is gone. Exchanges are ended even if it fails then."""
    ranks, standing = HeldRanks(Death(1, 1, "was lost", ())), Standing()
    reports = zmq.Context.instance().socket(zmq.PULL)
    reports.bind("inproc://reports-of-the-held")
    watch = Watch(lambda plan: ranks, ["cpu"], reports=reports, deadline_s=20.0, standing=standing, joining=None)
    try:
        assert ranks.ends.wait(20)
        assert re.match("rank 1 was lost, in", str(watch.cause))
    finally:
        ranks.may_end.set()
        watch.end(grace_s=0.0)
    assert standing.is_severed


class PausedRanks(HeldRanks):
    """Implements `RunningRanks` by one that says nothing, with an engine that does not run at its first look, for so long."""

    def __init__(self, paused_s: float) -> None:
        self.paused_s, self.num_looks, self.is_over = paused_s, 0, threading.Event()

    def poll(self) -> list[Death]:
        self.num_looks += 1
        if self.num_looks == 1:
            time.sleep(self.paused_s)
        elif self.num_looks == 4:
            self.is_over.set()
        return []

    def end(self, *, grace_s: float) -> None:
        self.is_over.set()


@pytest.mark.parametrize(("placed_s", "paused_s"), [(2.5, 0.0), (0.0, 2.5)])
def test_time_in_which_ranks_are_placed_or_the_engine_is_paused_counts_for_none(placed_s: float, paused_s: float) -> None:
    """As by a cluster that starts a node for them, and by `docker pause`; they may say nothing for two seconds."""
    ranks, reports = PausedRanks(paused_s), zmq.Context.instance().socket(zmq.PULL)
    reports.bind(f"inproc://reports-of-the-paused-{paused_s}")

    def launch(plan: LaunchPlan) -> PausedRanks:
        time.sleep(placed_s)
        return ranks

    watch = Watch(launch, ["cpu"], reports=reports, deadline_s=0.2, standing=Standing(), joining=None)
    try:
        assert ranks.is_over.wait(20)
        assert watch.cause is None
    finally:
        watch.end(grace_s=0.0)


@pytest.mark.parametrize(
    ("mesh", "device", "overlap"), [({"tp": 2}, "cuda", True), ({"tp": 1, "pp": 2}, "cuda", False), ({}, "cpu", False)]
)
def test_steps_of_stages_are_not_launched_before_tokens_are_known(mesh: dict[str, int], device: str, overlap: bool) -> None:
    """As on a CPU: other steps are on their way meanwhile, and to ask for both is refused."""
    assert _of_one_rank(options(**mesh), cast("Any", SimpleNamespace(address="")), device).overlap is overlap


def test_ranks_change_to_no_kernels_that_others_may_not_have_yet() -> None:
    assert _of_one_rank(options(), cast("Any", SimpleNamespace(address="")), "cuda").wait_for_kernels


@pytest.mark.parametrize(("given", "here", "elsewhere"), [(None, 2, 8), (5, 1, 5), (2, 1, 2)])
def test_ranks_of_one_host_share_its_threads(given: int | None, here: int, elsewhere: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of them; those of other hosts have their own."""
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    asked = options(tp=2, pp=2, num_threads=given)
    found = [_of_one_rank(asked, cast("Any", SimpleNamespace(address=at)), "cpu").num_threads for at in ("", "tcp://10.0.0.1:5550")]
    assert found == [here, elsewhere]


def test_while_ranks_are_awaited_the_start_says_so(registry: Registry) -> None:
    said: list[str] = []
    with pytest.raises(EnginError, match="no room for ranks"):
        Engine.build(options(executor="broken"), registry, lambda progress: said.append(progress.phase))
    assert said == ["ranks"]
    Engine.build(options(tp=1), registry, lambda progress: said.append(progress.phase)).close()
    assert said.count("ranks") == 1


def test_only_ranks_that_join_by_hand_need_a_key_file_beside_the_address() -> None:
    """Another executor brings a new key to its ranks."""
    asked = options(executor="brings", listen="tcp://127.0.0.1:0")
    spec = ExecutorSpec(name="brings", api=(2, 1), launch=lambda plan: plan.start([]), summary="a key", listen=str)
    wires = wires_of(asked, spec)
    wires.close()
    assert RankKey(wires.key).text == wires.key
    with pytest.raises(ConfigError, match="lets nobody in; engine rank --new-key FILE"):
        wires_of(asked, dataclasses.replace(spec, name="join"))


def test_one_that_fails_or_gives_nothing_is_named(registry: Registry) -> None:
    with pytest.raises(EnginError, match=r"placing.* built None, which is no RunningRanks: it has no boot, name"):
        Engine.build(options(executor="empty"), registry)
    with pytest.raises(EnginError, match=r"placing.* could not start the ranks: ValueError: no room for ranks"):
        Engine.build(options(executor="broken"), registry)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_unknown_one_is_told_what_there_is(registry: Registry, tp: int) -> None:
    with pytest.raises(PluginError, match=r"(?s)no executor 'wraped'; did you mean wrapped\?.*broken.*local.*wrapped"):
        Engine.build(options(executor="wraped", tp=tp), registry)


def test_one_rank_has_nothing_to_place(registry: Registry) -> None:
    with pytest.raises(ConfigError, match="executor is 'wrapped', but there is one rank"):
        Engine.build(options(executor="wrapped", tp=1), registry)
