"""Which steps are captured, and that the start says why where none are."""

from __future__ import annotations

from typing import Any

import pytest

from enginery.config.resolve import DeviceFacts, resolve
from enginery.config.schema import EngineOptions
from enginery.contracts.model import ModelFacts

MODEL = ModelFacts(vocab_size=1, hidden_size=1, max_positions=4096, activation_width=1, layers=())


@pytest.mark.parametrize(
    ("kind", "asked", "sizes", "reason"),
    [
        ("cuda", {}, (256, 1024), None),
        ("cuda", {"tp": 2}, (256, 1024), None),
        ("cpu", {}, (16, 0), None),
        ("cpu", {"dp_attention": 2}, (16, 0), None),
        ("cuda", {"graphs": False}, (0, 0), "asked for"),
        ("cuda", {"check_attention": True}, (0, 0), "--check-attention looks"),
        ("cuda", {"dp_attention": 2}, (256, 0), None),
        ("cpu", {"pp": 3}, (0, 0), "--pp 3 run their steps eagerly on cpu"),
        ("cuda", {"pp": 2}, (256, 0), None),
        ("cuda", {"tp": 2, "pp": 2}, (256, 0), None),
    ],
)
def test_the_start_says_why_steps_run_eagerly(kind: str, asked: dict[str, Any], sizes: tuple[int, int], reason: str | None) -> None:
    device = DeviceFacts(kind=kind, name="a fake", available_bytes=1, num_threads=1, has_bfloat16=True)
    settings = resolve(EngineOptions(max_batch_requests=256, **asked), device, MODEL, config={})
    assert (settings.max_graph_requests, settings.max_piece_tokens) == sizes
    reasons = [each.reason for each in settings.decisions if each.setting == "graphs"]
    assert reasons == [] if reason is None else reason in reasons[0]
