"""Ring-2.5 equals its vendor's own code, whose answers are in a file: transformers does not have this model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from parity.engine_driver import generate, last_logits

from enginery.config.schema import EngineOptions
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

FOLDER = Path(__file__).with_name("ring25")  # a model of random weights in two files, and what the vendor's code computes of it


def asked(**changes: object) -> EngineOptions:
    return EngineOptions(**{"model": str(FOLDER), "num_pages": 2000, "device": "cpu", **changes})


@pytest.mark.parametrize("length", [1, 33, 70])
def test_logits_are_the_vendors(registry: Registry, length: int) -> None:
    expected = np.load(FOLDER / "expected.npz")
    actual = last_logits(registry, asked(max_batch_tokens=16), expected["ids"][0, :length].tolist())
    torch.testing.assert_close(actual, torch.from_numpy(expected["logits"][0, length - 1]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("page_size", [1, 16])
def test_greedy_tokens_are_the_vendors_again_after_a_prefix_hit(registry: Registry, page_size: int) -> None:
    expected = np.load(FOLDER / "expected.npz")
    prompt, greedy = expected["greedy_prompt"][0].tolist(), expected["greedy"][0].tolist()
    engine = Engine.build(asked(page_size=page_size), registry)
    for _ in range(2):
        assert generate(engine, [prompt], max_tokens=len(greedy)) == [greedy]


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_changes_no_token(registry: Registry, monkeypatch: pytest.MonkeyPatch, *, overlap: bool) -> None:
    """Of four requests for the same."""
    monkeypatch.setattr("enginery.schedule.planner.HEADROOM_TOKENS", 0)
    expected = np.load(FOLDER / "expected.npz")
    prompt, greedy = expected["greedy_prompt"][0].tolist(), expected["greedy"][0].tolist()
    few = asked(num_pages=24, page_size=4, max_batch_tokens=7, prefix_cache=False, overlap=overlap)
    engine = Engine.build(few, registry)
    assert generate(engine, [prompt] * 4, max_tokens=len(greedy)) == [greedy] * 4
    assert engine.meter.stats().num_preempted > 0
