"""What all tensor ranks have to know of a step that a draft model follows, or whose drafts move states. The first rank tells it.

    first rank    forward │ sample, accept │ tell │ follow │ logits │ choose, tell │ step │ logits │ choose, tell ..
    the others    forward │                │ hear │ follow │ logits │         hear │ step │ logits │         hear ..

How often they exchange something follows from the step alone. Chains of drafts only: where drafts branch there is one rank.

S items that sample, R sampled rows, V tokens that a guess is chosen from, N tensor ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from enginery.contracts.step import StepInput
from enginery.worker.drafts.draft_model import DraftModel
from enginery.worker.ranks.collectives import HeadColumns, JoinedHead

_FIRST: Final = 0


class Outcome(NamedTuple):
    """What came of a step. tokens: [R] int64, what was sampled. accepted: [S] int64, how many drafts of each item are right."""

    tokens: torch.Tensor
    accepted: torch.Tensor


@dataclass(frozen=True, eq=False)
class Agreement:
    """Of the tensor ranks of `head`, of what guesses. draft_model: this rank's part of it; None where none follows."""

    head: HeadColumns
    draft_model: DraftModel | None

    @classmethod
    def of(cls, joined: JoinedHead, draft_model: DraftModel | None) -> Agreement:
        """joined: of the target, whose ranks these are, and whose vocabulary it is unless the draft model has one of its own."""
        own = None if draft_model is None else draft_model.vocab_size
        return cls(joined.shared if own is None else dataclasses.replace(joined.shared, vocab_size=own), draft_model)

    def outcome(self, step: StepInput, tokens: torch.Tensor | None = None, accepted: torch.Tensor | None = None) -> Outcome | None:
        """Of the step, on all ranks; None: none goes on from it. tokens, accepted: the first rank's; None on the others.

        accepted is also None where there were no drafts.
        """
        is_followed = self.draft_model is not None and step.draft_len > 0
        if not is_followed and not (step.verifies and step.states):
            return None
        num_rows, num_items = int(step.sampled_rows.sum()), len(step.sampling)
        told = torch.zeros(num_rows + num_items, dtype=torch.int64, device=self.head.group.device)
        if tokens is not None:
            told[:num_rows] = tokens
            told[num_rows:] = 0 if accepted is None else accepted
        if num_rows:
            self.head.group.from_first(told)
        return Outcome(told[:num_rows], told[num_rows:])

    def guess(self, partial: torch.Tensor, choose: Callable[[torch.Tensor], torch.Tensor], *, greedy: bool) -> torch.Tensor:
        """This rank's columns of logits, [S, V / N] -> [S] int64 on all ranks, the same.

        choose: how the first rank does it, from [S, V]. greedy: it takes the likeliest, so nobody needs all columns.
        """
        if greedy:
            return self.head.best(partial).clamp(min=0)
        logits = self.head.gather(partial)
        guesses = torch.empty(len(partial), dtype=torch.int64, device=partial.device)
        if self.head.group.rank == _FIRST:
            guesses.copy_(choose(logits))
        return self.head.group.from_first(guesses)
