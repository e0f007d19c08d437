"""Faster operations for CPUs."""

from enginery.api import OpSpec, hookimpl
from enginery_ops_cpu.spec import CPU


@hookimpl
def register_ops() -> list[OpSpec]:
    """One set."""
    return [CPU]
