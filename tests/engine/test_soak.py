"""The soak's own run on a CPU: short, small, with preemptions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine.soak import soak
from pairwise import EVERYTHING
from parity.engine_driver import options
from parity.oracle import FAMILIES, Oracle

from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry


@pytest.mark.parametrize("overlap", [False, True])
def test_no_page_is_lost_among_random_arrivals_and_aborts(write_oracle: Callable[..., Oracle], *, overlap: bool) -> None:
    asked = options(write_oracle("llama", FAMILIES["llama"]), num_pages=40, page_size=4, overlap=overlap)
    result = soak(Engine.build(asked, Registry.load()), seconds=0, least_steps=150 if EVERYTHING else 100, longest=24, rate=0.3)
    assert result["finished"] > 3
    assert result["aborted"] > 0
    assert result["free_pages"] + result["cached_pages"] == 40
