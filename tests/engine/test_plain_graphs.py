"""While nothing is guessed, captured steps are those of plain decoding: they keep nothing for a draft model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine.draft_models import assert_told, prompt_of
from engine.heads_made import Eagle3
from engine.small_pair import small_model
from engine.test_device_drafts import captured, requests_of, unread  # noqa: F401
from engine.test_speculation import answers_of
from parity.engine_driver import options
from parity.oracle import Oracle

from enginery.api import ForwardBatch
from enginery.contracts.drafting import FEATURES
from enginery.contracts.step import StepInput
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.speculate.length import DraftLength
from enginery.worker.paths.path import Forwarded

SAID = ("Hello", "Name three colours.", "What is 47 + 38?")


@pytest.fixture
def wanted(unread: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:  # noqa: F811
    """How much is guessed: its last entry."""
    lengths = [0]
    monkeypatch.setattr(DraftLength, "of", lambda self, num_requests: lengths[-1])
    return lengths


def test_hidden_states_are_kept_for_steps_that_are_followed(wanted: list[int], registry: Registry) -> None:
    requests = requests_of([prompt_of(said) for said in SAID])
    expected = answers_of(Engine.build(small_model(), registry), requests)
    asked = small_model(drafter="eagle", draft_length="auto", attention_backend="torch", num_pages=120, max_batch_requests=16)
    engine, capture, _ = captured(asked, registry)
    assert engine._runner.graphs is not None
    hidden = engine._runner.graphs.steps.speculation.hidden
    assert hidden is not None
    hidden.fill_(torch.nan)
    assert_told(answers_of(engine, requests), expected)
    assert capture.num_replayed > 9
    assert hidden.isnan().all()
    wanted.append(2)
    assert_told(answers_of(engine, requests), expected)
    assert not hidden.isnan().all()
    assert engine.meter.stats().drafts.accepted > 0


def test_tapped_hidden_states_too(
    wanted: list[int],
    llama: Oracle,
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = requests_of([llama.prompts[at][:20] for at in (0, 2)])
    expected = answers_of(Engine.build(options(llama), registry), requests)
    head = str(Eagle3().write(tmp_path))
    asked = options(llama, drafter="eagle3", draft_model=head, draft_length="auto", page_size=4, num_pages=200)
    engine, capture, _ = captured(asked, registry)
    features, replay = engine._runner.feed.named.buffers[FEATURES], engine._runner.graphs.forward

    def watched(step: StepInput, batch: ForwardBatch) -> Forwarded:
        features.fill_(torch.nan)
        forwarded = replay(step, batch)
        assert features.isnan().all() == (not step.draft_len)
        return forwarded

    monkeypatch.setattr(engine._runner.graphs, "forward", watched)
    for length in (0, 2):
        wanted.append(length)
        before = capture.num_replayed
        assert_told(answers_of(engine, requests), expected)
        assert capture.num_replayed > before + 9
    assert engine.meter.stats().drafts.verifications > 0
