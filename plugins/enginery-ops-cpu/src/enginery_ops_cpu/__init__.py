"""Faster operations for CPUs."""

from enginery.api import OpSpec, hookimpl
from enginery_ops_cpu.spec import COMPILED, CPU


@hookimpl
def register_ops() -> list[OpSpec]:
    """Compiled ones, and those in torch."""
    return [COMPILED, CPU]
