"""A step on a rank that does not sample: the same forward, and the same exchanges in the same order, as on the one that does.

What it takes part in follows from the step alone.
"""

from __future__ import annotations

import numpy as np
import torch

from enginery.contracts.step import StepInput
from enginery.kv.upload import to_device
from enginery.worker.layout import begins_of, logits_of_items, sampled_seats
from enginery.worker.paths.path import Launched
from enginery.worker.ranks.nccl import TensorGroup
from enginery.worker.runner import Runner
from enginery.worker.sampling import row_blocks


class Follower:
    """Runs the steps of another rank. group: the ranks of the stage. tells_tokens: tokens are needed before the host knows them."""

    def __init__(self, runner: Runner, group: TensorGroup, *, tells_tokens: bool) -> None:
        self._runner, self._group, self._tells_tokens = runner, group, tells_tokens

    @torch.inference_mode()
    def run(self, step: StepInput) -> None:
        """The next one; it returns when this rank's part of it is done, on a device when it is launched."""
        launched = self._runner.launch(step)
        self._join_prompts(launched)
        agreement = self._runner.agreement
        assert agreement is not None, "where ranks follow, the head is joined"
        tokens, accepted = agreement.outcome(step) or (None, None)
        if step.verifies and accepted is not None:
            self._runner.keep_accepted(launched, accepted[: step.num_decode])  # moves states no further than the right drafts
        self._runner.draft(launched, None, tokens, accepted)
        if self._tells_tokens and (tokens := share_tokens(self._group, step, None)) is not None:
            self._runner.feed.keep(tokens, to_device(sampled_seats(step), self._runner.device))

    def _join_prompts(self, launched: Launched) -> None:
        """The logits of prompts whose log-probabilities are asked for: items with more rows of logits than are sampled from."""
        step, rows = launched.step, launched.forwarded.rows
        items, counts = step.columns(), logits_of_items(step)
        firsts = begins_of(counts)
        for index in np.flatnonzero(items.num_logits > items.samples + items.num_drafts).tolist():
            assert rows is not None, "a step with rows that nobody samples from is no decoding step"
            for begin, count in row_blocks(int(items.num_logits[index] - items.samples[index])):
                first = int(firsts[index]) + begin
                self._runner.model.logits(rows[first : first + count])


def share_tokens(group: TensorGroup, step: StepInput, tokens: torch.Tensor | None) -> torch.Tensor | None:
    """What the first rank has sampled, [S] int64, on all ranks; None: they know it, or nobody waits for it.

    tokens: of the first rank, on its device, with `NAN_TOKEN`; None on the others.
    """
    if step.run.tokens_only or step.verifies or not len(step.sampling):
        return None
    told = torch.empty(len(step.sampling), dtype=torch.int64, device=group.device) if tokens is None else tokens.clamp(min=0)
    return group.from_first(told)
