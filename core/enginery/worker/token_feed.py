"""How tokens get into a step: those of the host in one upload, those that the step before samples from where it left them.

    host      input_ids   [ 17 |  0 |  0 | 5 | 9 ]                0: not known yet
              sources     [ -1 |  6 | 16 | -1| -1]                places in `tokens`, by the seats of their requests
    device    tokens      [ .. 42 g1 (seat 3) .. 7 g1 (seat 8) ]  written by the step before: what it sampled, and guesses
              input_ids   [ 17 | 42 |  7 | 5 | 9 ]

So a step can be built and launched before the tokens of the one before have come back to the host, and before its guesses are made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from enginery.attention.axes import renewed, token_fields, with_token_fields
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.step import StepInput
from enginery.kv.upload import pinned, to_device
from enginery.worker.layout import KNOWN, has_pending, token_sources
from enginery.worker.named_tensors import NamedTensors


class TokenFeed:
    """Owns the last token of each running request on the device, and the guesses at the next: [num_seats + 1, 1 + D] int64.

    The `scratch_seat` is for padding. wrong: [num_seats + 1] int64, device, of the guesses that a step verified last.
    named: where the inputs and outputs are that only the model knows. most_drafts: D.
    """

    def __init__(self, num_seats: int, device: torch.device, *, named: NamedTensors, most_drafts: int) -> None:
        self.device = device
        self._on_host = device.type == "cpu"
        self.named = named
        self.scratch_seat = num_seats
        self.width = 1 + most_drafts
        self.tokens = torch.zeros(num_seats + 1, self.width, dtype=torch.int64, device=device)
        self.wrong = torch.zeros(num_seats + 1, dtype=torch.int64, device=device)

    def upload(self, step: StepInput, batch: ForwardBatch, *, logits_rows: torch.Tensor | None) -> ForwardBatch:
        """The batch that the step was laid out as, padded or not, with its token fields on the device, complete."""
        batch, pending = self.named.with_inputs(batch, step.inputs), has_pending(step)
        if not self._on_host:
            sources = token_sources(step, width=self.width, size=batch.num_tokens)
            packed = to_device(torch.stack([*token_fields(batch), sources]), self.device)  # [fields + 1, T]
            batch, sources = with_token_fields(batch, iter(packed)), packed[-1]
        elif pending:
            sources = token_sources(step, width=self.width, size=batch.num_tokens)
        ids = batch.input_ids
        if pending:
            ids = torch.empty_like(ids)
            self.fill(batch.input_ids, sources, out=ids)
        return self.named.placed(renewed(batch, input_ids=ids, logits_rows=logits_rows))

    def overwrite(self, packed: torch.Tensor, fields: Sequence[torch.Tensor]) -> None:
        """Copy what a step has for each token, [T] int64 each on the host, over what graphs read: [fields, T]."""
        if self._on_host:
            torch.stack(tuple(fields), out=packed)
        else:
            packed.copy_(pinned(torch.stack(tuple(fields)), self.device), non_blocking=True)

    def fill(self, input_ids: torch.Tensor, sources: torch.Tensor, *, out: torch.Tensor) -> None:
        """[T] int64 each: a pending token from its place, to `out`, which may be `input_ids`. Device work only."""
        torch.where(sources == KNOWN, input_ids, self.tokens.view(-1)[sources.clamp(min=0)], out=out)

    def keep(self, sampled: torch.Tensor, seats: torch.Tensor) -> None:
        """Remember what was sampled, [S] int64, at `seats`, [S] int64. Device work only."""
        self.tokens[:, 0].index_copy_(0, seats, sampled)

    def keep_drafts(self, drafts: torch.Tensor, seats: torch.Tensor) -> None:
        """Remember guesses at what follows, [S, d] int64, at `seats`, [S] int64. Device work only."""
        self.tokens[:, 1 : 1 + drafts.shape[1]].index_copy_(0, seats, drafts)
