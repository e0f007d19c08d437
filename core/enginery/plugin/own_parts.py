"""The core's own parts, which it registers through its own hooks."""

from __future__ import annotations

from operator import attrgetter

from enginery.contracts.drafting import DrafterSpec
from enginery.contracts.parallel import ExecutorSpec, LaunchPlan, RunningRanks
from enginery.contracts.schedule import SchedulePolicySpec
from enginery.errors import ConfigError
from enginery.plugin.hookspecs import hookimpl


@hookimpl
def register_schedule_policies() -> list[SchedulePolicySpec]:
    """First come first served, the default, and shortest first; both within a priority."""
    first, shortest = attrgetter("priority", "arrival_s"), attrgetter("priority", "num_tokens", "arrival_s")
    return [
        SchedulePolicySpec(name="fcfs", api=(2, 0), key=first, summary="by priority, then by arrival"),
        SchedulePolicySpec(name="shortest-first", api=(2, 0), key=shortest, summary="by priority, then by number of tokens"),
    ]


def _join(plan: LaunchPlan) -> RunningRanks:
    assert plan.joining is not None, "this executor listens"
    return plan.joining.wait()


def _listen(asked: str | None) -> str:
    if asked is None:
        raise ConfigError("--executor join waits for ranks of other hosts; say where, by --listen tcp://ADDRESS:PORT")
    return asked


@hookimpl
def register_drafters() -> list[DrafterSpec]:
    """A model of any family."""
    summary = "a smaller model with the same vocabulary"
    return [DrafterSpec(name="standalone", api=(2, 0), summary=summary, most=8, stands_alone=True)]


@hookimpl
def register_executors() -> list[ExecutorSpec]:
    """Ranks as processes of this host, or as those that join from others."""
    return [
        ExecutorSpec(
            name="local",
            api=(2, 0),
            launch=lambda plan: plan.start([plan.command] * plan.num_others),
            summary="processes of this host",
        ),
        ExecutorSpec(name="join", api=(2, 1), launch=_join, summary="those that join by engine rank --join", listen=_listen),
    ]
