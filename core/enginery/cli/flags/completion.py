"""Values that the shell completes. Each takes what was typed so far, and imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from enginery.bench.workloads import WORKLOADS, shapes
from enginery.contracts.attention import AttnBackendSpec, SparseCoordinatorSpec
from enginery.contracts.drafting import DrafterSpec
from enginery.contracts.model import CheckpointSpec
from enginery.contracts.parallel import ExecutorSpec
from enginery.contracts.schedule import SchedulePolicySpec
from enginery.plugin.discovery import Wanted, discover
from enginery.plugin.registry import Registry

Complete = Callable[[str], list[str]]


def one_of(*values: str) -> Complete:
    """Complete one of these values."""
    return lambda incomplete: _starting(incomplete, values)


def offered(kind: type[object], *others: str) -> Complete:
    """Complete the name of what plugins offer of this kind, or one of the others."""
    return lambda incomplete: _starting(incomplete, [*others, *(offer.name for offer in Registry.load().offers(kind))])


backends: Final = offered(AttnBackendSpec, "auto")
policies: Final = offered(SchedulePolicySpec, "auto")
executors: Final = offered(ExecutorSpec)
coordinators: Final = offered(SparseCoordinatorSpec, "off")
drafters: Final = offered(DrafterSpec, "auto", "off")
models: Final = offered(CheckpointSpec)  # where none fits, the shell offers folders
workloads: Final = one_of(*WORKLOADS)


def bench_models(incomplete: str) -> list[str]:
    """Complete what engine bench takes for a model: a workload, a shape or an installed checkpoint."""
    return [*workloads(incomplete), *_starting(incomplete, shapes()), *models(incomplete)]


def blocks(incomplete: str) -> list[str]:
    """Complete no:NAME for a plugin that is installed."""
    return _starting(incomplete, [f"no:{found.record.name}" for found in discover(Wanted())])


def _starting(incomplete: str, values: Iterable[str]) -> list[str]:
    return sorted(value for value in values if value.startswith(incomplete))
