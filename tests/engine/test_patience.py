"""The rule by which ranks are given up: one deadline to be heard and to work, ten to get further."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from enginery.engine.ranks.driver import ON_DEVICE, RankProcesses
from enginery.engine.ranks.messages import Alive
from enginery.engine.ranks.patience import Patience
from enginery.errors import EngineDied
from enginery.worker.ranks.gloo import Standing

DEADLINE_S = 2.0
STEP = ("step 7", 0.0)


@dataclasses.dataclass
class Ranks:
    """Two other ranks, that say something every second until told otherwise, on a clock of the test's."""

    standing: Standing = dataclasses.field(default_factory=Standing)
    now_s: float = 0.0
    works: bool = True
    worked_s: float = 0.0

    def __post_init__(self) -> None:
        self.patience = Patience(2, deadline_s=DEADLINE_S, standing=self.standing, now_s=0.0)

    def until(self, end_s: float, *, heard: tuple[int, ...] = (1, 2), busy: tuple[str, float] | None = STEP, **at: str) -> str:
        """What the rule says by then, the ranks being at this place; the clock stops when it says something."""
        while self.now_s < end_s:
            self.now_s += 1
            self.worked_s += self.works
            for rank in heard:
                phase = at.get("phase", "step").format(now=self.now_s)
                waits = at.get(f"waits_{rank}", "")
                self.patience.take(Alive(rank=rank, number=6, phase=phase, waits=waits, worked_s=self.worked_s), self.now_s)
            if told := self.patience.broken(busy, self.now_s, lambda rank: f"rank {rank}"):
                return told
        return ""


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_a_rank_that_was_heard_is_given_up_after_a_deadline_without_a_word(ranks: Ranks) -> None:
    assert ranks.until(2) == ""
    assert ranks.until(99, heard=(1,)).startswith("rank 2 has said nothing for 2 s, since step: it was stopped, or starved")
    assert ranks.now_s == 2 + DEADLINE_S + 1


def test_a_rank_that_was_never_heard_has_ten_deadlines(ranks: Ranks) -> None:
    assert ranks.until(99, heard=(1,)).startswith("rank 2 has said nothing for 20 s, since its start")
    assert ranks.now_s == 10 * DEADLINE_S + 1


def test_a_step_that_is_only_slow_has_ten_deadlines(ranks: Ranks) -> None:
    """Its processors work all the time."""
    assert ranks.until(99) == "step 7 has got no further for 20 s; --step-deadline 2 allows no more"
    assert ranks.now_s == 1 + 10 * DEADLINE_S + 1


def test_exchanges_in_a_slow_step_do_not_make_it_get_further(ranks: Ranks) -> None:
    told = ""
    for second in range(1, 99):
        if told := ranks.until(second, waits_1="sum" if second % 2 else "", waits_2="sum" if second % 2 else ""):
            break
    assert told.startswith("step 7 has got no further for 20 s")


def test_a_start_that_goes_on_has_any_time(ranks: Ranks) -> None:
    """More and more bytes of weights."""
    assert ranks.until(500, busy=("its start", 0.0), phase="start: weights {now:.0f}") == ""
    assert ranks.until(999, busy=("its start", 0.0), phase="start: weights 500").startswith("its start has got no further for 20 s")


@pytest.mark.parametrize("phase", ["attention", "model", "weights 500"])
def test_a_start_that_compiles_or_reads_has_ten_deadlines(ranks: Ranks, phase: str) -> None:
    """One rank's compilers work, which are processes of their own, and the others wait for them: FlashInfer's take two minutes.

    Of a disk it may be long until the next tensor has come.
    """
    ranks.works, ranks.standing.waits = False, "of_all"
    told = ranks.until(999, busy=("its start", 0.0), phase=f"start: {phase}")
    assert told.startswith("its start has got no further for 20 s")
    assert ranks.now_s == 1 + 10 * DEADLINE_S + 1


def test_ranks_that_wait_for_each_other_where_a_start_may_compile_have_one_deadline(ranks: Ranks) -> None:
    ranks.works, ranks.standing.waits = False, "of_all"
    told = ranks.until(999, busy=("its start", 0.0), phase="start: model", waits_1="sum", waits_2="sum")
    assert told.startswith("the ranks wait for each other in its start")
    assert ranks.now_s == 1 + DEADLINE_S + 1


def test_a_rank_that_does_nothing_in_a_step_has_one_deadline(ranks: Ranks) -> None:
    assert ranks.until(1) == ""
    ranks.works = False
    assert ranks.until(99, waits_1="sum") == "rank 2 hangs: for 2 s it has done nothing in step 7, in step"
    assert ranks.now_s == 1 + DEADLINE_S + 1


def test_ranks_that_wait_for_each_other_have_one_deadline(ranks: Ranks) -> None:
    ranks.works, ranks.standing.waits = False, "of_all"
    told = ranks.until(99, waits_1="sum", waits_2="sum")
    assert told.startswith("the ranks wait for each other in step 7: rank 0 in the exchange 'of_all', rank 1 in the exchange 'sum'")
    assert ranks.now_s == 1 + DEADLINE_S + 1


def test_ranks_whose_devices_wait_for_each_other_have_one_deadline(ranks: Ranks) -> None:
    """On GPUs a rank has nothing left to do for a step that it has launched; the first waits for its tokens."""
    ranks.works, ranks.standing.waits = False, ON_DEVICE
    told = "the ranks wait for each other in step 7: rank 0 in the exchange 'step on the device', rank 1 in idle, rank 2 in idle"
    assert ranks.until(99, phase="idle") == told
    assert ranks.now_s <= 2 + DEADLINE_S


@dataclasses.dataclass
class Running:
    """A step, on a device where `copied` is something. seen: what its rank said while it was waited for."""

    standing: Standing
    copied: object | None
    seen: list[str] = dataclasses.field(default_factory=list)

    def wait(self) -> str:
        self.seen.append(self.standing.waits)
        return "what it gave"


@dataclasses.dataclass
class Driver:
    """What `RankProcesses.wait` needs of its object."""

    _standing: Standing
    cause: EngineDied | None = None

    def check(self) -> None:
        if self.cause is not None:
            raise self.cause


@pytest.mark.parametrize(("copied", "waits"), [(object(), ON_DEVICE), (None, "")])
def test_who_waits_for_a_device_says_so(copied: object | None, waits: str) -> None:
    driver = Driver(Standing())
    running = Running(driver._standing, copied)
    assert RankProcesses.wait(cast("Any", driver), cast("Any", running)) == "what it gave"
    assert running.seen == [waits]
    assert driver._standing.waits == ""


def test_what_a_step_gave_whose_exchanges_were_ended_is_not_taken() -> None:
    driver = Driver(Standing(), cause=EngineDied("rank 1 is gone"))
    with pytest.raises(EngineDied, match="rank 1 is gone"):
        RankProcesses.wait(cast("Any", driver), cast("Any", Running(driver._standing, object())))


def test_a_step_is_watched_for_to_its_end_though_the_one_before_it_has_landed() -> None:
    """With stages two are on their way, and behind the last one nothing more is sent."""
    said: list[str | None] = []
    driver = SimpleNamespace(_newest=8, _watch=SimpleNamespace(busy=said.append))
    RankProcesses.landed(cast("Any", driver), cast("Any", SimpleNamespace(number=7)))
    assert said == []
    RankProcesses.landed(cast("Any", driver), cast("Any", SimpleNamespace(number=8)))
    assert said == [None]


def test_idle_ranks_need_not_work(ranks: Ranks) -> None:
    ranks.works = False
    assert ranks.until(500, busy=None, phase="idle") == ""


def test_time_in_which_nobody_could_be_heard_is_not_counted(ranks: Ranks) -> None:
    assert ranks.until(2) == ""
    ranks.now_s += 100
    ranks.patience.pause(100)
    assert ranks.patience.broken(("step 7", 102.0), ranks.now_s, str) == ""
    assert ranks.until(104, busy=("step 7", 102.0)) == ""


def test_who_did_not_run_is_given_the_time_to_get_further_too(ranks: Ranks) -> None:
    assert ranks.until(2) == ""
    ranks.now_s += 100
    ranks.patience.pause(100)
    assert ranks.until(102 + 9 * DEADLINE_S) == ""


def test_who_comes_from_one_exchange_to_the_next_does_not_hang_in_one(ranks: Ranks) -> None:
    """Its processors wait all the time: a slow step, as one in which they work."""
    ranks.works, ranks.standing.waits, told = False, "sum", ""
    for second in range(1, 99):
        if told := ranks.until(second, waits_1=f"sum {second}", waits_2=f"sum {second}"):
            break
    assert told.startswith("step 7 has got no further for 20 s")
