"""For all tests: whether Triton compiles, what is random, and what is loaded once.

Triton compiles its kernels or interprets them, and decides that once, when it is first imported. Machines without a CUDA device
interpret them. torch imports Triton too, so this comes before any test does. The variable must not stay set: the engine would
choose the interpreted plugins for every other test.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import os
from collections.abc import Iterator
from unittest.mock import patch

import hypothesis
import pytest
import quick_interpreter
import quick_loading
import quick_processes
import torch
from pairwise import EVERYTHING

if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    with patch.dict(os.environ, TRITON_INTERPRET="1"):
        importlib.import_module("triton.experimental.gluon")
    quick_interpreter.install(importlib.import_module("triton.runtime.interpreter"))

quick_loading.install()
if not EVERYTHING:
    quick_processes.install()

# Each client reads all certificates of this machine anew, 0.1 s of processor time; the tests make thousands.
for name in ("httpx", "httpx2"):
    if importlib.util.find_spec(name) is not None:
        transports = importlib.import_module(f"{name}._transports.default")
        transports.create_ssl_context = functools.cache(transports.create_ssl_context)

# No example is too slow. They are the same every time: `--hypothesis-profile searching` looks for new ones.
hypothesis.settings.register_profile("searching", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("repeatable", hypothesis.settings.get_profile("searching"), derandomize=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test's random numbers do not depend on the tests before. `torch.manual_seed` also keeps a stack for each kind of device
    that is not there yet, 1 ms."""
    seed = torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture
def own_processes() -> Iterator[None]:
    """What the test starts is started as users start it, with all its imports."""
    with quick_processes.own_processes():
        yield


def pytest_collection() -> None:
    """Modules and tests stay; looking among them for what does not takes 2 s."""
    gc.disable()


def pytest_collection_finish() -> None:
    """From here on the collector looks at what tests made, and at that less often: a look at all modules takes 0.4 s."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()
    quick_loading.begin()
