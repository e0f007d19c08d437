"""What tests of several ranks ask, of which models, and how the answers are compared."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import noise
import pytest
from engine.rank_models import CONFIGS
from engine.rank_pair import Told

from enginery.config.schema import EngineOptions
from enginery.contracts.batch import Phase
from enginery.contracts.step import StepInput
from enginery.engine.engine import Engine

MLA, MOE = "deepseek-v2-lite-experts", "qwen3-moe"
SMALL = {"max_batch_tokens": 32, "page_size": 4, "num_pages": 128}
PROMPTS = [[5, 77, 200, 31] * 9, [8, 9, 140], [3] * 20, [5, 77, 200, 31] * 9 + [99, 101]]
SERVED = {name: config for name, config in CONFIGS.items() if not name.startswith("hybrid")}  # that one is no plugin's


def options(**changes: object) -> EngineOptions:
    given = {**noise.OPTIONS, "device": "cpu", "dtype": "float32", "num_pages": 64, "num_threads": 1, "step_deadline": 20.0}
    return EngineOptions(**{**given, **changes})


def folder_of(tmp_path: Path, name: str) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SERVED[name]))
    return str(tmp_path)


def assert_equal(found: Mapping[str, Told], expected: Mapping[str, Told], *, within: float = 2e-5) -> None:
    """The same tokens; numbers within rounding. within: of log-probabilities."""
    assert {name: told.tokens for name, told in found.items()} == {name: told.tokens for name, told in expected.items()}
    for name, told in found.items():
        assert told.error is None
        for mine, theirs in zip(told.logprobs + told.prompt, expected[name].logprobs + expected[name].prompt, strict=True):
            if mine is None or theirs is None:
                assert mine is theirs
                continue
            assert mine.token_id == theirs.token_id
            assert math.isclose(mine.logprob, theirs.logprob, abs_tol=within)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        assert told.embedding == pytest.approx(expected[name].embedding, abs=1e-4)


ASKED = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 7},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 3},
    "seeded, with logprobs": {"temperature": 1.0, "seed": 1, "logprobs": 0},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {7: 4.0}},
}


def phases_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Phase, ...]]:
    """Of each step, what its lanes are at."""
    seen: list[tuple[Phase, ...]] = []
    launch = engine._runner.launch

    def noted(step: StepInput) -> object:
        seen.append(tuple(own.phase for own in step.lanes))
        return launch(step)

    monkeypatch.setattr(engine._runner, "launch", noted)
    return seen


def assert_whole(engine: Engine) -> None:
    """Of every lane each page is free or cached, and no request is left."""
    lanes = engine.meter.stats().lanes
    assert len(lanes) == 2
    for lane in lanes:
        assert (lane.num_running, lane.num_waiting) == (0, 0)
        for counts in lane.pages.values():
            assert counts.free + counts.cached == counts.total
