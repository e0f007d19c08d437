"""Faster operations for CUDA devices, in Triton."""

from enginery.api import OpSpec, hookimpl
from enginery_ops_triton.spec import TRITON


@hookimpl
def register_ops() -> list[OpSpec]:
    """One set."""
    return [TRITON]
