"""What a rank knows of the others: its collectives, the head of a model whose columns several ranks have, and what these agree on.

All tensor ranks have to know something of a step that a draft model follows, or whose drafts move states. The first tells it.

    first rank    forward │ sample, accept │ tell │ follow │ logits │ choose, tell │ step │ logits │ choose, tell ..
    the others    forward │                │ hear │ follow │ logits │         hear │ step │ logits │         hear ..

How often they exchange something follows from the step alone. Chains of drafts only: where drafts branch there is one rank.

N rows, C hidden size, V vocabulary, R tensor ranks; S items that sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from enginery.contracts.model import Model
from enginery.contracts.ops import EarlySums, OpTable, PeerOps
from enginery.contracts.parallel import Collectives
from enginery.contracts.step import StepInput
from enginery.contracts.weights import Linear
from enginery.nn.parallel import SingleRank
from enginery.worker.choice import Choice
from enginery.worker.drafts.draft_model import DraftModel
from enginery.worker.memory_plan import MemoryPlan
from enginery.worker.paths.results import ModelResults
from enginery.worker.sampling import NAN_TOKEN
from enginery.worker.weights.rank import BoundLinear

if TYPE_CHECKING:  # an engine of one rank has no groups, and may have a torch without them
    from enginery.worker.paths.captured_step import Capture
    from enginery.worker.paths.cuda_capture import CudaCapture
    from enginery.worker.ranks.gloo import Group
    from enginery.worker.ranks.lanes import LaneRows
    from enginery.worker.ranks.nccl import TensorGroup


@dataclass(frozen=True, eq=False)
class HeadColumns:
    """Logits of which several ranks have some columns each, V / R, the last ones filled up: brought together, or the best of them.

    group: these ranks. peer_ops: finds the best of so many; None: the group exchanges what each has found.
    """

    group: TensorGroup
    vocab_size: int
    peer_ops: PeerOps | None = None

    def gather(self, partial: torch.Tensor) -> torch.Tensor:
        """[N, V / R] of each rank -> [N, V] on the first, zeros without memory on the others. Nothing is exchanged for no rows."""
        parts = self.group.at_first(partial) if len(partial) else []
        if not parts:
            return partial.new_zeros(()).expand(len(partial), self.vocab_size)
        return torch.cat(parts, dim=-1)[:, : self.vocab_size]

    def best(self, partial: torch.Tensor) -> torch.Tensor:
        """[N, V / R] of each rank -> [N] int64: the largest's index, of equal ones the lowest. `NAN_TOKEN` where it is NaN."""
        first = self.group.rank * partial.shape[-1]
        own = partial[:, : max(self.vocab_size - first, 0)]
        if self.peer_ops is not None and self.peer_ops.takes_best(own):
            return self.peer_ops.best(own, first)
        if not own.shape[1]:  # a rank whose columns only pad
            own = partial.new_full((len(partial), 1), -torch.inf)
        values, columns = own.max(dim=-1)
        found = self.group.of_all(torch.stack((values.double(), (columns + first).double())))  # exact: there are fewer than 2^53
        values, columns = torch.stack(found, dim=1)  # [R, N] each
        values, winner = values.max(dim=0)
        return torch.where(values.isnan(), NAN_TOKEN, columns.gather(0, winner[None])[0].long())


@dataclass(frozen=True, eq=False)
class RankCollectives:
    """Implements `enginery.contracts.parallel.Collectives`.

    group: the lane's tensor ranks. across: of each lane the one in this one's place, by lane; None: there is one. head: of the
    ranks of all lanes. peer_ops: of one lane, takes sums within norms; None: nobody does.
    """

    group: TensorGroup
    across: TensorGroup | None
    ops: OpTable
    head: HeadColumns
    peer_ops: PeerOps | None = None

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """[N, C], in place."""
        return self.group.sum(partial) if self.group.size > 1 else partial

    def all_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The lanes have as many rows each."""
        return x if self.across is None else torch.cat(self.across.of_all(x))

    def own_rows_sum(self, partial: torch.Tensor) -> torch.Tensor:
        """[L N, C] of L lanes -> [N, C]: first over the lanes, as each has rows of its own, then within this one."""
        return self.sum(partial if self.across is None else self.across.own_part_sum(partial))

    def add_rms_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, of_all_lanes: bool = False
    ) -> torch.Tensor:
        """In one kernel where one takes so much, or the sum, then the operation."""
        if self.peer_ops is not None and self.peer_ops.takes_sum(partial, residual, weight):
            return self.peer_ops.add_rms_norm(partial, residual, weight, eps)
        return self.ops.add_rms_norm(self.own_rows_sum(partial) if of_all_lanes else self.sum(partial), residual, weight, eps)

    def summed_early(self, linear: Linear) -> Linear:
        """By the kernels that take sums, if they send rows early."""
        if not (isinstance(self.peer_ops, EarlySums) and isinstance(linear, BoundLinear) and linear.complete is None):
            return linear
        return BoundLinear(self.peer_ops.summed_early(linear.product, sum(linear.rows)), linear.rows)

    def gather_columns(self, partial: torch.Tensor) -> torch.Tensor:
        """On the first rank, which samples. Rows are of all lanes."""
        return self.head.gather(partial)

    def best(self, partial: torch.Tensor) -> torch.Tensor:
        """Rows are of all lanes."""
        return self.head.best(partial)


class JoinedHead:
    """The head of a model of which each of several ranks has some of the columns. lanes: where there are several.

    exchanges: what the model's forward exchanges by in host memory, whose calls can be recorded.
    """

    def __init__(
        self,
        model: Model,
        shared: HeadColumns,
        results: ModelResults,
        lanes: LaneRows | None = None,
        exchanges: Sequence[Group] = (),
    ) -> None:
        """shared: of all ranks of the stage. results: what is to come of all ranks together."""
        self.shared, self.lanes, self.exchanges, self._model = shared, lanes, exchanges, model
        self._results = results._replace(vocab_size=-(-results.vocab_size // shared.group.size))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, V], on the first rank."""
        return self.shared.gather(self.columns(hidden))

    def best(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N] int64 on all ranks: the tokens of the largest logits, `NAN_TOKEN` where one is NaN."""
        return self.shared.best(self.columns(hidden))

    @property
    def width(self) -> int:
        """V / R, of this rank's columns, those that pad included."""
        return self._results.vocab_size

    def columns(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, V / R], this rank's columns of logits."""
        return self._results.logits(self._model.logits(hidden), hidden)


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

    def outcome(
        self, step: StepInput, tokens: torch.Tensor | None = None, accepted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What all ranks know of the step: what was sampled, [rows] int64, and how many drafts of each item are right, [S] int64.

        None: none goes on from it. tokens, accepted: the first rank's; None on others, accepted also where there were no drafts.
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
        return told[:num_rows], told[num_rows:]

    def guess(self, partial: torch.Tensor, choose: Callable[[torch.Tensor], torch.Tensor], *, greedy: bool) -> torch.Tensor:
        """This rank's columns of logits, [S, V / N] -> [S] int64 on all ranks, the same.

        choose: how the first rank does it, from [S, V]. greedy: it takes the likeliest, so nobody needs all columns.
        """
        if greedy:
            return self.head.best(partial).clamp(min=0)
        logits = self.head.gather(partial)
        guesses = torch.empty(len(partial), dtype=torch.int64, device=partial.device)
        if self.head.group.rank == 0:
            guesses.copy_(choose(logits))
        return self.head.group.from_first(guesses)


class Met:
    """What a rank knows of the others; as it is, that there are none."""

    def compare(self, choice: Choice, *, what: str) -> None:
        """Raise `ConfigError` where ranks have chosen otherwise. what: is compared, for the message."""

    def smallest(self, memory: MemoryPlan) -> MemoryPlan:
        """As many pages of each kind as every rank has room for."""
        return memory

    def collectives(self, ops: OpTable, choice: Choice) -> Collectives:
        return SingleRank(ops)

    def together(self) -> None:
        """Wait on the host until all of the stage have come here."""

    def outside(self, capture: CudaCapture) -> Capture:
        """The same, of what a stage computes: what crosses is in no graph. Graphs end before the groups of ranks do."""
        return capture

    def joined(self, model: Model, choice: Choice, comm: Collectives) -> tuple[Model, JoinedHead | None]:
        """The model of this rank, with what arrives from the stage before, and the head of all ranks. comm: its collectives."""
        return model, None
