"""The executor `ray`, and `serving`: an application for Ray Serve."""

from __future__ import annotations

from enginery.api import ExecutorSpec, hookimpl
from enginery_executor_ray.spec import RAY


@hookimpl
def register_executors() -> list[ExecutorSpec]:
    """Ranks wherever Ray puts them."""
    return [RAY]
