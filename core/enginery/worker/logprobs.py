"""Log-probabilities on their way to the host: computed with the step, read when its tokens are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from enginery.contracts.model import Model
from enginery.contracts.request import TokenLogprob
from enginery.contracts.step import PromptTargets
from enginery.kv.upload import to_device

PROMPT_LOGPROB_ROWS = 256  # logits of so many prompt tokens are in memory at once


class LogprobTable(NamedTuple):
    """Of N tokens: their ids [N] and own log-probabilities [N], the K likeliest ids [N, K] and theirs [N, K].

    On the host, valid when the device has come past the step that they are of. num_top: how many of K each row asks for.
    """

    token_ids: torch.Tensor
    own: torch.Tensor
    ids: torch.Tensor
    best: torch.Tensor
    num_top: Sequence[int]

    def rows(self) -> list[TokenLogprob]:
        """To be called when they are valid."""
        found = zip(*(part.tolist() for part in self[:4]), self.num_top, strict=True)
        return [
            TokenLogprob(token_id=token, logprob=own, top=tuple(zip(ids[:count], best[:count], strict=True)))
            for token, own, ids, best, count in found
        ]


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> LogprobTable:
    """The log-probability of `token_ids` [N] under [N, V] and each row's `num_top` likeliest ones, before any adjustment."""
    table = logits.float().log_softmax(-1)
    own = table.gather(1, token_ids[:, None]).squeeze(1)
    best, ids = table.topk(min(max(num_top), table.shape[-1]), dim=-1)
    token_ids, own, ids, best = (part.to("cpu", non_blocking=True) for part in (token_ids, own, ids, best))
    return LogprobTable(token_ids, own, ids, best, num_top)


def row_blocks(num_rows: int) -> Iterator[tuple[int, int]]:
    """The first row, and how many, of each call of a model's `logits` for so many tokens of a prompt, on every rank."""
    for begin in range(0, num_rows, PROMPT_LOGPROB_ROWS):
        yield begin, min(PROMPT_LOGPROB_ROWS, num_rows - begin)


def prompt_logprob_tables(model: Model, targets: PromptTargets, hidden: torch.Tensor) -> list[LogprobTable]:
    """What the rows of a prompt's chunk say of the tokens that follow them. hidden: [n, C], of at least as many rows as targets."""
    tables: list[LogprobTable] = []
    for begin, count in row_blocks(len(targets.token_ids)):
        following = to_device(torch.from_numpy(targets.token_ids[begin : begin + count]), hidden.device)
        logits = model.logits(hidden[begin : begin + count])
        tables.append(token_logprobs(logits, following, [targets.num_top] * len(following)))
    return tables
