"""With guesses in bfloat16: where a token differs from plain decoding's, steps of other shapes could have chosen either.

Products of other numbers of rows are rounded otherwise. How far that moves logits is measured, of the same tokens as prompts in
chunks of several lengths. Two logits may be rounded away from each other in any case, by a step each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from engine.draft_models import SAID, asking, counts_of, embedded, prompt_of
from engine.test_speculation import Told, answers_of
from parity.engine_driver import RecordingModel, drain

from enginery.contracts.batch import ForwardBatch, Phase
from enginery.contracts.model import Model
from enginery.contracts.request import GenerationRequest
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.speculate.acceptance import AcceptedRows, accept

REQUESTS = [asking(f"{at}", prompt_of(SAID[at]), max_tokens=44) for at in (1, 3, 4, 5)]
CHUNKS = (1, 3, 16)  # of one token: plain decoding
Change = Callable[[Model], Model]


def same(model: Model) -> Model:
    return model


def built(registry: Registry, change: Change, **changes: object) -> Engine:
    """change: what becomes of the model."""
    asked = embedded(dtype="bfloat16", **changes)
    parts = build_parts(asked, registry)
    return Engine(dataclasses.replace(parts, step=parts.step._replace(model=change(parts.step.model))), registry, asked)


def logits_of(registry: Registry, ids: tuple[int, ...], chunk: int) -> torch.Tensor:
    """After each of these tokens: [T, V] float32."""
    found: list[RecordingModel] = []

    def recorded(model: Model) -> Model:
        found.append(RecordingModel(model))
        return found[0]  # type: ignore[return-value]

    engine = built(registry, recorded, max_batch_tokens=chunk, max_batch_requests=1, graphs=False)
    engine.submit(asking("", ids, max_tokens=1, prompt_logprobs=0))
    drain(engine, {})
    return torch.cat(found[0].recorded).float()


@pytest.fixture(scope="module")
def plain(registry: Registry) -> dict[str, Told]:
    return answers_of(built(registry, same), REQUESTS)


Measured = Callable[[GenerationRequest], tuple[torch.Tensor, float]]


@pytest.fixture(scope="module")
def measured(registry: Registry, plain: dict[str, Told]) -> Measured:
    """Plain decoding's logits for each token of the answer, and how far rounding moves the difference of two of the best."""

    @functools.cache
    def of(about: str, prompt: tuple[int, ...]) -> tuple[torch.Tensor, float]:
        one, *others = (logits_of(registry, (*prompt, *plain[about].tokens), chunk) for chunk in CHUNKS)
        best = one.topk(4).indices
        moved = torch.stack([(each - one).gather(1, best) for each in others])  # [chunks, T, 4]
        two_steps = 2 * torch.finfo(torch.bfloat16).eps * one.abs().max()
        return one[len(prompt) - 1 : -1], max(float((moved.amax(-1) - moved.amin(-1)).max()), float(two_steps))

    return lambda request: of(request.request_id, tuple(request.prompt_token_ids))


def assert_within_noise(
    registry: Registry, plain: dict[str, Told], measured: Measured, change: Change = same, **drafter: object
) -> None:
    """Of each request the first two tokens that differ are as close to the best logit as chunks move the best ones."""
    engine = built(registry, change, **drafter)
    told = answers_of(engine, REQUESTS)
    assert counts_of(engine).accepted > 10
    for request in REQUESTS:
        pairs = list(zip(plain[request.request_id].tokens, told[request.request_id].tokens, strict=True))
        place = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        if place is not None:
            logits, noise = measured(request)
            margins = (logits[place].max() - logits[place, list(pairs[place])]).tolist()
            assert max(margins) <= noise, f"request {request.request_id}, token {place}: {margins=}, {noise=}"


@pytest.mark.parametrize(("drafter", "length"), [("eagle", "4"), ("standalone", "2"), ("lookup", "8")])
def test_a_token_that_differs_is_within_the_noise_of_batch_shapes(
    registry: Registry, plain: dict[str, Told], measured: Measured, drafter: str, length: str
) -> None:
    assert_within_noise(registry, plain, measured, drafter=drafter, draft_length=length)


def one_more(
    sampled: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor | None, num_drafts: torch.Tensor, *, depth: int | None = None
) -> AcceptedRows:
    """A defect: the first wrong draft counts as right."""
    right = accept(sampled, tokens, parents, num_drafts, depth=depth)
    counts = torch.minimum(right.counts + 1, num_drafts)
    return AcceptedRows(torch.minimum(torch.arange(tokens.shape[1]), counts[:, None]), counts)


class Displaced:
    """A defect: what is verified stands a page further on."""

    def __init__(self, model: Model) -> None:
        self._model, self.logits, self.embedded = model, model.logits, model.embedded  # type: ignore[attr-defined]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        moved = 16 if batch.phase is Phase.VERIFY else 0
        batch.positions.add_(moved)
        found = self._model.forward(batch)
        batch.positions.sub_(moved)
        return found  # type: ignore[return-value]


@pytest.mark.parametrize("defect", ["a wrong draft is told", "positions are wrong"])
def test_defects_are_not_taken_for_noise(
    registry: Registry, plain: dict[str, Told], measured: Measured, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    change: Change = Displaced  # type: ignore[assignment]
    if defect == "a wrong draft is told":
        monkeypatch.setattr("enginery.worker.runner.accept", one_more)
        change = same
    with pytest.raises(AssertionError, match="margins="):
        assert_within_noise(registry, plain, measured, change, drafter="eagle", draft_length="4", graphs=False)
