"""One step on the device: build, plan, run, sample."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from enginery.attention.relay import BackendRelay
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.model import Model
from enginery.contracts.request import TokenLogprob
from enginery.run.batch import build_batch, logits_rows
from enginery.run.sampling import SamplingRow, sample, token_logprobs
from enginery.schedule.step import ScheduledItem, ScheduledStep

PROMPT_LOGPROB_ROWS = 256  # logits of so many prompt tokens are in memory at once


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step gave, item by item: the token sampled (None for a prompt's chunk before its last), and log-probabilities.

    prompt_logprobs: of the tokens that follow the rows of this chunk, where they were asked for.
    """

    token_ids: list[int | None]
    logprobs: list[TokenLogprob | None]
    prompt_logprobs: list[list[TokenLogprob]]
    plan_s: float
    run_s: float


class Runner:
    """Owns the model and its backend; remembers nothing between steps."""

    def __init__(
        self, model: Model, relay: BackendRelay, *, page_size: int, device: torch.device, eos_token_ids: frozenset[int]
    ) -> None:
        self.model = model
        self.relay = relay
        self.page_size = page_size
        self.device = device
        self.eos_token_ids = eos_token_ids

    @torch.inference_mode()
    def run(self, step: ScheduledStep) -> StepResult:
        """Run the step and wait for its tokens."""
        began = time.perf_counter()
        batch = build_batch(step, page_size=self.page_size, device=self.device)
        self.relay.plan(batch)
        planned = time.perf_counter()
        hidden = self.model.forward(batch)  # [T, C]
        token_ids, logprobs, prompt_logprobs = self._sample(step.items, batch, hidden)
        return StepResult(
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            plan_s=planned - began,
            run_s=time.perf_counter() - planned,
        )

    def _sample(
        self, items: Sequence[ScheduledItem], batch: ForwardBatch, hidden: torch.Tensor
    ) -> tuple[list[int | None], list[TokenLogprob | None], list[list[TokenLogprob]]]:
        rows = logits_rows(batch)  # [N]
        wanted = hidden if len(rows) == hidden.shape[0] else hidden.index_select(0, rows.to(self.device))  # [N, C]
        prompt_logprobs: list[list[TokenLogprob]] = [[] for _ in items]
        sampling, last_rows, end = [], [], 0
        for index, item in enumerate(items):
            start, end = end, end + item.num_logits
            if item.samples:
                sampling.append(index)
                last_rows.append(end - 1)
            if item.request.wants_prompt_logits:
                prompt_logprobs[index] = self._prompt_logprobs(item, wanted[start:end])
        token_ids: list[int | None] = [None] * len(items)
        logprobs: list[TokenLogprob | None] = [None] * len(items)
        if not sampling:
            return token_ids, logprobs, prompt_logprobs
        chosen_rows = wanted if len(last_rows) == len(wanted) else wanted[torch.tensor(last_rows, device=self.device)]
        logits = self.model.logits(chosen_rows)  # [N, V]
        sampled = sample(logits, [_sampling_row(items[index]) for index in sampling], self.eos_token_ids)
        for index, token in zip(sampling, sampled.tolist(), strict=True):
            token_ids[index] = token
        asked = [items[index].request.asked.params.logprobs for index in sampling]
        if any(count is not None for count in asked):
            reported = token_logprobs(logits, sampled, [count or 0 for count in asked])
            for index, count, logprob in zip(sampling, asked, reported, strict=True):
                logprobs[index] = logprob if count is not None else None
        return token_ids, logprobs, prompt_logprobs

    def _prompt_logprobs(self, item: ScheduledItem, hidden: torch.Tensor) -> list[TokenLogprob]:
        """Of the prompt tokens that follow this chunk's rows, [N, C]; recomputed output tokens are left out."""
        request = item.request
        first = item.start + item.num_tokens - item.num_logits
        following = request.token_ids[first + 1 : min(item.start + item.num_tokens + 1, request.num_prompt_tokens)]
        count = request.asked.params.prompt_logprobs or 0
        reported: list[TokenLogprob] = []
        for begin in range(0, len(following), PROMPT_LOGPROB_ROWS):
            targets = torch.tensor(following[begin : begin + PROMPT_LOGPROB_ROWS], device=self.device)
            logits = self.model.logits(hidden[begin : begin + len(targets)])
            reported += token_logprobs(logits, targets, [count] * len(targets))
        return reported


def _sampling_row(item: ScheduledItem) -> SamplingRow:
    request = item.request
    return SamplingRow(params=request.asked.params, token_ids=request.token_ids, num_prompt_tokens=request.num_prompt_tokens)
