"""Warming up runs every kind of step, for nobody."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from parity.engine_driver import options
from parity.oracle import FAMILIES, Oracle

from enginery.contracts.batch import ForwardBatch, Phase
from enginery.plugin.registry import Registry
from enginery.run.build import build_parts
from enginery.run.warm_up import warm_up


def test_all_phases_run_and_only_the_scratch_page_is_written(
    write_oracle: Callable[..., Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = build_parts(options(write_oracle("llama", FAMILIES["llama"])), Registry.load())
    pool, ran = parts.relay.backend.pool, list[tuple[Phase, int]]()
    forward = parts.model.forward

    def recorded(batch: ForwardBatch) -> torch.Tensor:
        ran.append((batch.phase, batch.num_tokens))
        return forward(batch)

    monkeypatch.setattr(parts.model, "forward", recorded)
    warm_up(parts.model, parts.relay, ops=parts.ops, geometry=pool.geometry, device=torch.device("cpu"), longest=48)
    assert {phase for phase, _ in ran} == {Phase.PREFILL, Phase.DECODE, Phase.MIXED}
    assert (Phase.PREFILL, 48) in ran
    keys, values = pool.layer(0)
    assert not keys[:-1].any()
    assert not values[:-1].any()
    assert keys[-1].any()
