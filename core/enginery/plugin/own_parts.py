"""The core's own parts, which it registers through its own hooks."""

from __future__ import annotations

from enginery.contracts.parallel import ExecutorSpec, LaunchPlan, RunningRanks
from enginery.contracts.schedule import QueuedFacts, SchedulePolicySpec
from enginery.plugin.hookspecs import hookimpl


def _first_come(request: QueuedFacts) -> tuple[float, ...]:
    return (request.priority, request.arrival_s)


def _shortest(request: QueuedFacts) -> tuple[float, ...]:
    return (request.priority, request.num_tokens, request.arrival_s)


@hookimpl
def register_schedule_policies() -> list[SchedulePolicySpec]:
    """First come first served, the default, and shortest first; both within a priority."""
    return [
        SchedulePolicySpec(name="fcfs", api=(2, 0), key=_first_come, summary="by priority, then by arrival"),
        SchedulePolicySpec(name="shortest-first", api=(2, 0), key=_shortest, summary="by priority, then by number of tokens"),
    ]


def _local(plan: LaunchPlan) -> RunningRanks:
    return plan.start([plan.command] * plan.num_others)


@hookimpl
def register_executors() -> list[ExecutorSpec]:
    """Ranks as processes of this host."""
    return [ExecutorSpec(name="local", api=(2, 0), launch=_local, summary="processes of this host")]
