"""The trace of the first steps has what the host did, in order."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from enginery import LLM, SamplingParams
from enginery.errors import ConfigError


@pytest.mark.parametrize("overlap", [False, True])
def test_every_part_of_every_traced_step_is_in_the_file(tmp_path: Path, overlap: bool) -> None:
    path = tmp_path / "steps.json"
    with LLM(profile_steps=3, profile_file=str(path), overlap=overlap) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["name"] for event in events] == ["schedule", "build", "plan", "launch", "wait"] * 3
    assert [event["args"]["tokens"] for event in events[::5]] == [3, 1, 1]
    for step in range(3):
        parts = events[5 * step : 5 * step + 5]
        assert all(event["dur"] >= 0 for event in parts)
        assert all(later["ts"] >= earlier["ts"] + earlier["dur"] - 1 for earlier, later in itertools.pairwise(parts))
    if overlap:  # the second step is scheduled before the first has been waited for
        assert events[5]["ts"] < events[4]["ts"]


def test_a_negative_number_of_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="profile_steps is -1"):
        LLM(profile_steps=-1)
