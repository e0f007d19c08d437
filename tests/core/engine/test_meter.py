"""What the engine says of guesses that are seldom right, and what it keeps of a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from enginery.contracts.batch import Phase
from enginery.contracts.engine import EngineFacts
from enginery.contracts.request import RequestOutput
from enginery.contracts.step import StepInput, StepTimes
from enginery.engine.meter import StepMeter, StepTrace
from enginery.plugin.registry import Registry
from enginery.schedule.scheduler import Scheduler


@pytest.mark.parametrize(("accepted", "warns"), [(0, True), (1, False)])
def test_guesses_that_are_seldom_right_are_warned_of_once(caplog: pytest.LogCaptureFixture, *, accepted: int, warns: bool) -> None:
    nothing = None
    meter = StepMeter(
        cast("Registry", nothing),
        cast("Scheduler", nothing),
        cast("EngineFacts", nothing),
        changeover=None,
        trace_file=Path("trace"),
    )
    right = RequestOutput(request_id="r", token_ids=tuple(range(1 + accepted)), num_drafted=3, num_accepted=accepted)
    plain = RequestOutput(request_id="p", token_ids=(1,))
    meter.verified([right, plain] * 255)
    assert not caplog.records, "so few say nothing"
    for _ in range(3):
        meter.verified([right, plain])
    assert len(caplog.records) == warns
    if warns:
        assert "told 1.00 tokens on average, of at most 4.0, in the first 256; was the draft model made" in caplog.text


def test_a_trace_that_is_written_keeps_nothing(tmp_path: Path) -> None:
    trace = StepTrace(2, tmp_path / "trace.json")
    for number in range(4):
        trace.add(StepInput(number=number, phase=Phase.DECODE), StepTimes(1, 2, 3, 4), began_s=0, scheduled_s=0.5)
        assert len(trace._events) == (5, 0, 0, 0)[number]
    assert len(json.loads(trace.path.read_text())["traceEvents"]) == 10
