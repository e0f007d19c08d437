"""What an engine guesses by a head or a module, beside what it should, and that it changes no answer."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch
from engine.heads_made import Step, guessed, guessed_by_chain
from engine.test_speculation import answers_of
from parity.oracle import Oracle, shape
from transformers import LlamaConfig

from enginery.config.schema import EngineOptions
from enginery.contracts.model import Model
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.worker.drafts.draft_model import Choose, DraftModel

CHUNK = 24
PROMPT = 40  # in two chunks


def asking(about: str, prompt: Iterable[int], **changes: object) -> GenerationRequest:
    params = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **changes}
    return GenerationRequest(request_id=about, prompt_token_ids=tuple(prompt), params=SamplingParams(**params))  # type: ignore[arg-type]


def options(folder: Path, **changes: object) -> EngineOptions:
    given = {"model": str(folder), "num_pages": 300, "device": "cpu", "num_threads": 1, "max_batch_tokens": CHUNK, **changes}
    return EngineOptions(**given)  # type: ignore[arg-type]


Guesses = list[tuple[list[int], list[int], list[torch.Tensor]]]


def guesses_of(engine: Engine, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> Guesses:
    """After each step that told: all tokens so far, what is guessed to follow, and the logits that were looked at for it."""
    looked_at: list[torch.Tensor] = []
    guess = DraftModel.guess

    def noted(
        self: DraftModel, state: torch.Tensor, positions: torch.Tensor, choose: Choose, module: Model | None = None
    ) -> torch.Tensor:
        looked_at.extend((module or self._modules[0]).logits(state)[:1].double())
        return guess(self, state, positions, choose, module)

    monkeypatch.setattr(DraftModel, "guess", noted)
    engine.submit(asking("a", prompt))
    tokens, found = list(prompt), []
    while engine.has_work:
        looked_at.clear()
        told = [token for output in engine.step() for token in output.token_ids]
        tokens += told
        if told and engine.has_work:
            guesses = dict(engine._made.of([(engine._scheduler.table.by_id["a"], 99)]))
            found.append((list(tokens), list(guesses.get("a", ())), list(looked_at)))
    return found


def assert_guesses(
    found: Guesses,
    steps: Sequence[Step],
    features: Callable[[list[int]], torch.Tensor],
    *,
    mixed: Callable[[torch.Tensor], torch.Tensor] = lambda features: features,
    own: torch.Tensor | None = None,
    by_features: bool = False,
) -> None:
    """steps: of a chain's modules, or one, again and again. own: the target's tokens that the head knows; None for all."""
    assert len(found) > 3
    for tokens, guesses, looked_at in found[:5]:
        hidden, following, count = features(tokens)[:-1], tokens[1:], len(guesses)
        if len(steps) > 1:
            expected, logits = guessed_by_chain(steps, hidden, following, count, by_features=by_features)
        else:
            expected, logits = guessed(steps[0], hidden, following, count, mixed=mixed)
        assert guesses == expected
        for one, other in zip(looked_at, logits, strict=True):
            assert torch.allclose(one, other if own is None else other[own], atol=2e-3, rtol=1e-3)


def assert_same_answers(
    registry: Registry,
    folder: Path,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    most: int = 4,
    **drafter: object,
) -> None:
    """Greedy and seeded, prompts in chunks and together, while the number of guesses changes; that these are wrong is said."""
    asked = [
        asking(f"{at} {heat}", prompt[: 30 + at], temperature=heat, seed=at, max_tokens=20 + at)
        for at, prompt in enumerate(prompts)
        for heat in (0.0, 0.2)  # with more of it, random models are even, and agree
    ]
    expected = answers_of(Engine.build(options(folder), registry), asked)
    chance = random.Random(2)
    monkeypatch.setattr("enginery.speculate.length.DraftLength.of", lambda self, count: chance.choice((0, 1, 2, most)))
    monkeypatch.setattr("enginery.engine.meter._ENOUGH_VERIFICATIONS", 20)
    engine = Engine.build(options(folder, draft_length=str(most), page_size=4, num_pages=1200, **drafter), registry)
    for about, one in answers_of(engine, asked).items():
        assert (one.tokens, one.reason) == (expected[about].tokens, expected[about].reason), about
    assert engine.meter.stats().drafts.drafted > 100
    assert re.search(r"a verification told 1\.0\d tokens on average", caplog.text)
    assert caplog.text.count("guesses are seldom right") == 1


@pytest.fixture
def llama(write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle("llama of six", LlamaConfig(**shape(num_hidden_layers=6, rms_norm_eps=1e-5)))
