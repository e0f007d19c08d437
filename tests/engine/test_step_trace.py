"""The trace of the first steps has what the host did, in order."""

from __future__ import annotations

import itertools
import json
import shutil
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


def test_a_disk_that_fills_up_ends_the_trace_and_the_recording_and_not_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    trace, steps = folder / "trace.json", folder / "steps.bin"
    with LLM(profile_steps=2, profile_file=str(trace), record_steps=(9, str(steps)), num_pages=16) as llm:
        shutil.rmtree(folder)  # no file can be written in it, as on a full disk
        asked = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        assert len(llm.generate([[5, 6, 7]], asked)[0].token_ids) == 4
    told = [record.getMessage() for record in caplog.records]
    ended = [line for line in told if "recording" in line]
    assert ended == [f"recording ends before step 0: {steps} cannot be written: No such file or directory"]
    assert told.count(f"there is no trace, as {trace} cannot be written: No such file or directory") == 1


def test_a_negative_number_of_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="profile_steps is -1"):
        LLM(profile_steps=-1)
