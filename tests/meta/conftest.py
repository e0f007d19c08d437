"""Syntax trees of the whole project come and go here, and none of their nodes is in a cycle: the collector looks in vain."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()
