"""What the executor is, without Ray."""

from __future__ import annotations

import importlib.util

from enginery.api import ExecutorSpec, LaunchPlan, PluginError, RunningRanks


def _launch(plan: LaunchPlan) -> RunningRanks:
    from enginery_executor_ray.placing import place

    return place(plan)


def _listen(asked: str | None) -> str:
    """Any port of the address by which Ray's nodes know this one. Connects to Ray on this thread, the main one, as it wants it."""
    if importlib.util.find_spec("ray") is None:
        raise PluginError("--executor ray needs Ray; pip install 'enginery-executor-ray[ray]'")
    from enginery_executor_ray.placing import own_address

    found = own_address()
    return asked or f"tcp://{found}:0"


RAY = ExecutorSpec(name="ray", api=(2, 2), launch=_launch, summary="places ranks on a Ray cluster", listen=_listen)
