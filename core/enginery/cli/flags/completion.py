"""Values that the shell completes. Each takes what was typed so far, and imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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


def backends(incomplete: str) -> list[str]:
    """Complete the name of an attention backend that can be loaded here."""
    return _starting(incomplete, ["auto", *_offered(AttnBackendSpec)])


def policies(incomplete: str) -> list[str]:
    """Complete the name of a schedule policy."""
    return _starting(incomplete, ["auto", *_offered(SchedulePolicySpec)])


def executors(incomplete: str) -> list[str]:
    """Complete the name of what places ranks."""
    return _starting(incomplete, _offered(ExecutorSpec))


def coordinators(incomplete: str) -> list[str]:
    """Complete the name of a sparse-KV coordinator."""
    return _starting(incomplete, ["off", *_offered(SparseCoordinatorSpec)])


def drafters(incomplete: str) -> list[str]:
    """Complete the name of a drafter."""
    return _starting(incomplete, ["auto", "off", *_offered(DrafterSpec)])


def models(incomplete: str) -> list[str]:
    """Complete the name of an installed checkpoint. Where none fits, the shell offers folders."""
    return _starting(incomplete, _offered(CheckpointSpec))


def workloads(incomplete: str) -> list[str]:
    """Complete the name of a workload of engine bench offline."""
    return _starting(incomplete, WORKLOADS)


def bench_models(incomplete: str) -> list[str]:
    """Complete what engine bench takes for a model: a workload, a shape or an installed checkpoint."""
    return [*workloads(incomplete), *_starting(incomplete, shapes()), *models(incomplete)]


def blocks(incomplete: str) -> list[str]:
    """Complete no:NAME for a plugin that is installed."""
    return _starting(incomplete, [f"no:{found.record.name}" for found in discover(Wanted())])


def _offered(kind: type[object]) -> list[str]:
    return [offer.name for offer in Registry.load().offers(kind)]


def _starting(incomplete: str, values: Iterable[str]) -> list[str]:
    return sorted(value for value in values if value.startswith(incomplete))
