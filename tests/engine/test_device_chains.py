"""Draft models that are no single module with keys and values of its own, where the device alone knows how many guesses were right.

Right guesses are drawn by chance, as the models' weights are; told tokens and guesses are to be those that there are where the host
reads, which are compared with transformers elsewhere (test_model_heads, test_prediction_modules, test_frozen_keys).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine.heads_made import Module
from engine.model_heads import asking, options
from engine.prediction_modules import chain_of
from engine.test_device_drafts import captured, unread
from engine.test_frozen_keys import EPS, with_reader, write
from engine.test_speculation import Told, answers_of
from parity.oracle import Oracle, shape
from transformers import LlamaConfig

from enginery.config.schema import EngineOptions
from enginery.contracts.request import GenerationRequest
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.worker.drafts.tails import _Kept
from enginery.worker.runner import Guesses

__all__ = ["chain_of", "unread"]  # fixtures of others

RATES = (0.8, 0.7, 0.6)


def guesses_and_answers(engine: Engine, requests: list[GenerationRequest]) -> tuple[list[list[list[int]]], dict[str, Told]]:
    """What is guessed after each step, and what each request is told."""
    found, draft = list[list[list[int]]](), engine._runner.draft

    def noted(*given: object) -> Guesses | None:
        guesses = draft(*given)  # type: ignore[arg-type]
        if guesses is not None:
            found.append([list(guesses.of(place)) for place in range(len(guesses.tokens))])
        return guesses

    engine._runner.draft = noted  # type: ignore[method-assign]
    return found, answers_of(engine, requests)


def requests_of(oracle: Oracle) -> list[GenerationRequest]:
    """Greedy and drawn; prompts come in chunks."""
    return [
        asking(f"{at} {heat}", oracle.prompts[at][: 20 + 9 * at], temperature=heat, seed=at, max_tokens=14 + at, ignore_eos=True)
        for at in (1, 2, 4)
        for heat in (0.0, 0.8)
    ]


def assert_same_guesses(
    request: pytest.FixtureRequest, asked: EngineOptions, registry: Registry, requests: list[GenerationRequest], *, how: str
) -> None:
    expected, told = guesses_and_answers(Engine.build(asked, registry, forced_rates=RATES), requests)
    request.getfixturevalue("unread")
    if how == "eager":
        engine = Engine.build(asked, registry, forced_rates=RATES)
    else:
        engine, capture, drafts = captured(asked, registry, forced_rates=RATES)
        assert drafts is None
    found, now = guesses_and_answers(engine, requests)
    assert {about: one.tokens for about, one in now.items()} == {about: one.tokens for about, one in told.items()}
    assert found == expected
    counts = engine.meter.stats().drafts
    assert 0.3 < counts.accepted / counts.drafted < 0.9
    if how == "captured":
        assert capture.num_replayed > 5


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_a_chain_of_modules_guesses_as_where_the_host_reads(
    request: pytest.FixtureRequest, chain_of: Callable[..., Module], registry: Registry, how: str
) -> None:
    """Rows that are run over again end where the device alone knows."""
    module = chain_of("glm4-moe")
    asked = options(module.folder, drafter="mtp", draft_length="3", attention_backend="torch", num_pages=60, max_batch_tokens=24)
    assert_same_guesses(request, asked, registry, requests_of(module.oracle), how=how)


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_a_model_that_reads_guesses_as_where_the_host_reads(
    request: pytest.FixtureRequest, write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path, how: str
) -> None:
    """By the target's keys and values, and backends."""
    llama = write_oracle("llama of four", LlamaConfig(**shape(rms_norm_eps=EPS)))
    drafter = {"drafter": "reader", "draft_model": str(write(tmp_path / "reader")), "draft_length": "3"}
    asked = options(llama.folder, attention_backend="torch", page_size=4, num_pages=200, max_batch_tokens=24, **drafter)
    assert_same_guesses(request, asked, with_reader(registry), requests_of(llama), how=how)


@pytest.mark.parametrize(("start", "ids"), [(9, []), (10, [8]), (11, [7, 8]), (13, [7, 8]), (14, [])])
def test_as_many_rows_are_run_over_again_as_there_were_up_to_where_the_request_goes_on(start: int, ids: list[int]) -> None:
    """Behind a first row and three guesses, of which the host did not know how many were right; none where it is elsewhere."""
    kept = _Kept(ends=(10, 13), spare=0, wanted=2, ids=torch.tensor([7, 8]), features=torch.tensor([[0.7], [0.8]]))
    tail = kept.before(start)
    assert tail.ids.tolist() == ids
    assert len(tail.features) == len(ids)
    assert not ids or tail.end == start
