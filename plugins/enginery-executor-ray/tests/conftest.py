"""A Ray cluster of this machine alone, for the tests of this plugin. They need Ray: `tox -e ray`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def with_ray() -> Any:
    """The package, where it is installed."""
    return pytest.importorskip("ray", reason="Ray is not installed; tox -e ray has it")


@pytest.fixture(scope="session")
def cluster(with_ray: Any) -> Iterator[None]:
    """With eight processors and four GPUs, whatever the machine has: ranks that wait take none, and nothing computes on a GPU.

    A key of an API is in its environment, as where the cluster was started by somebody who has one.
    """
    ray = with_ray
    os.environ["RAY_AUTH_MODE"] = "disabled"  # of this machine alone
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINERY_API_KEY", "a-key")
        ray.init(address="local", num_cpus=8, num_gpus=4, include_dashboard=False, log_to_driver=False, logging_level="warning")
    yield
    ray.shutdown()
