"""Drives an engine by hand: submits greedy requests, runs steps, collects tokens and logits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from statistics import median
from unittest.mock import patch

import torch
from pairwise import EVERYTHING
from parity.oracle import NUM_GREEDY, GreedyReference, Oracle

from enginery.config.schema import EngineOptions
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.model import Model
from enginery.contracts.parallel import StageTensors
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.schedule.planner import HEADROOM_TOKENS
from enginery.testing.kits.model_ranks import FolderModel

# How the work of all prompts may be cut up; on a CPU several ways at once. Where `num_pages` are stated, they are few.
CUTS: list[dict[str, object]] = [
    {"page_size": 16},
    {"max_batch_tokens": 7, "page_size": 1},
    {"num_pages": 12, "page_size": 16, "max_batch_requests": 3},
    {"overlap": True},
]
TOGETHER: list[dict[str, object]] = [
    {"num_pages": 150, "max_batch_tokens": 7, "page_size": 1, "overlap": True},
    {"num_pages": 12, "page_size": 16, "max_batch_requests": 3},
]
CUT_UP = CUTS if EVERYTHING else TOGETHER


class RecordingModel:
    """Passes everything on and keeps the logits, which a step computes first for what is sampled, then for prompts.

    A step that is replayed in pieces passes no `forward` here: all of those count as one.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._steps: list[list[torch.Tensor]] = [[]]

    @property
    def recorded(self) -> list[torch.Tensor]:
        """In the order of the rows of one request."""
        return [logits for step in self._steps for logits in (*step[1:], *step[:1])]

    @property
    def latest(self) -> torch.Tensor:
        """What was computed last, of whatever step."""
        return self._steps[-1][-1]

    def forward(self, batch: ForwardBatch, arrived: StageTensors | None = None) -> torch.Tensor | StageTensors:
        self._steps.append([])
        return self.model.forward(batch, arrived)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._steps[-1].append(self.model.logits(hidden))
        return self._steps[-1][-1]


def options(oracle: Oracle, **changes: object) -> EngineOptions:
    return EngineOptions(**{"model": str(oracle.folder), "num_pages": 2000, "device": "cpu", **changes})


def greedy(request_id: str, prompt: list[int], **changes: object) -> GenerationRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_GREEDY, "ignore_eos": True, **changes})
    return GenerationRequest(request_id=request_id, prompt_token_ids=tuple(prompt), params=params)


def drain(engine: Engine, tokens: dict[str, list[int]]) -> dict[str, list[int]]:
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def generate(engine: Engine, prompts: list[list[int]], **changes: object) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        engine.submit(greedy(str(index), prompt, **changes))
    tokens = drain(engine, {})
    return [tokens[str(index)] for index in range(len(prompts))]


def assert_greedy(reference: GreedyReference, answers: list[list[int]], prompts: Sequence[list[int]] | None = None) -> None:
    """The answers, to the reference's prompts or others, are its own `NUM_GREEDY` greedy tokens."""
    expected = reference.greedy_after(reference.prompts if prompts is None else prompts, guesses=answers)
    assert answers == expected


def assert_cut_up(
    oracle: Oracle, registry: Registry, changes: dict[str, object], prompts: Sequence[list[int]] | None = None
) -> None:
    """However the work is cut up, the answers are the oracle's. Where the changes say `num_pages`, requests are preempted."""
    prompts, is_scarce = oracle.prompts if prompts is None else list(prompts), "num_pages" in changes
    with patch("enginery.schedule.planner.HEADROOM_TOKENS", 0 if is_scarce else HEADROOM_TOKENS):
        engine = Engine.build(options(oracle, **changes), registry)
        assert_greedy(oracle, generate(engine, prompts), prompts)
    assert engine.meter.stats().num_preempted > 0 or not is_scarce


def last_logits(registry: Registry, asked: EngineOptions, prompt: list[int]) -> torch.Tensor:
    """What the engine computes after the prompt: [vocabulary] float32, host."""
    return each_last_logits(registry, asked, [prompt])[0]


def each_last_logits(registry: Registry, asked: EngineOptions, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
    """The same for several prompts, one after the other in one engine."""
    parts = build_parts(asked, registry)
    recording = RecordingModel(parts.step.model)
    engine = Engine(dataclasses.replace(parts, step=parts.step._replace(model=recording)), registry, asked)
    answers = []
    for prompt in prompts:
        engine.submit(greedy("a", prompt, max_tokens=1))
        drain(engine, {})
        answers.append(recording.latest[-1].float().cpu())
    return answers


def assert_last_logits(
    oracle: Oracle, registry: Registry, prompts: Sequence[list[int]], *, atol: float = 1e-4, **changes: object
) -> None:
    """After each of these prompts the engine computes what the oracle does."""
    for prompt, found in zip(prompts, each_last_logits(registry, options(oracle, **changes), prompts), strict=True):
        torch.testing.assert_close(found, oracle.logits(prompt)[-1], atol=atol, rtol=0)


def assert_ranks(oracle: Oracle, prompt: list[int], **how: object) -> None:
    """Each rank of a model that is divided so has the oracle's logits of the prompt. how: see `FolderModel.run`."""
    model, expected = FolderModel(oracle.folder, json.loads((oracle.folder / "config.json").read_text())), oracle.logits(prompt)
    for answer in model.run(prompt, torch.float32, **how):
        torch.testing.assert_close(answer.logits, expected, atol=1e-4, rtol=0)


def rounding_error(oracle: Oracle, registry: Registry, dtype: str = "bfloat16", **changes: object) -> float:
    """How far what the engine computes after a prompt in `dtype` is from the oracle's, as a part of that.

    The median over prompts: where two experts are nearly tied, rounding chooses the other one, and a single prompt's error is ten
    times the others'.
    """
    prompts = oracle.prompts[:5]
    expected = [oracle.logits(prompt)[-1] for prompt in prompts]
    found = each_last_logits(registry, options(oracle, dtype=dtype, **changes), prompts)
    return median(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(found, expected, strict=True))
