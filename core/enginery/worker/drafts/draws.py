"""How a draft model's guesses are chosen: from its logits as the target's token will be, with the same random number.

A guess counts if it is the token that the target draws at its position (`enginery.speculate.acceptance`). Where two models say
much the same, draws by one number's noise mostly agree, also where the likeliest token is seldom drawn (arXiv:2408.07978). What a
guess is chosen by changes no token. Penalties, biases and grammars are the target's alone.

A graph draws with what is copied to where it looks, and is captured for a kind of draws: the rest is the same for all.

Of a comb (`enginery.speculate.combs`) the tokens beside a guess are the likeliest others, drawn or not.

S items, V vocabulary, 1 + n tokens of a guess and beside it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from enginery.contracts.ops import LEAST_TEMPERATURE, OpTable, SamplingTensors
from enginery.contracts.step import SamplingInput
from enginery.kv.upload import pinned, to_device
from enginery.worker.sampling import most_kept, uniform_on_device

Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # from logits [S, V'] and the positions of tokens to [S, 1 + n]
Together = Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]
_FEW: Final = 64  # kept tokens that a graph may be captured for, if it is not for all
_NO_TOKEN: Final = -2  # nothing is sampled as this
_ROWS, _POSITIONS = 512, 8192  # after which the drawn numbers repeat


class DrawKind(NamedTuple):
    """cut: some row drops tokens. few: no row keeps more than `_FEW`, by its top_k."""

    cut: bool
    few: bool


DRAW_KINDS: Final = (DrawKind(cut=True, few=False), DrawKind(cut=True, few=True), DrawKind(cut=False, few=False))


class GuessDraws:
    """Of the items of one step. rows: [S], the first sampled row of each. sampling: of the rows; None: all take the best token.

    siblings: beside each guess, n. kind: of what is drawn; None: nothing is; told to ranks that know none. together: of ranks with
    some columns each; given these, and how this one would choose from all, [S, V] -> [S], it gives what all take; no siblings then.
    """

    def __init__(
        self,
        sampling: SamplingInput | None,
        rows: np.ndarray,
        *,
        ops: OpTable,
        device: torch.device,
        siblings: int = 0,
        together: Together | None = None,
        kind: DrawKind | None = None,
    ) -> None:
        assert together is None or not siblings, "guesses of several ranks do not branch"
        params = np.zeros((4, len(rows))) if sampling is None else sampling.params[:, rows]
        self._seeds = np.zeros(len(rows), np.uint64) if sampling is None else sampling.seeds[rows]
        self._params, self._ops, self._device, self._together, self._siblings = params, ops, device, together, siblings
        self.kind = kind
        if sampling is not None and bool((params[0] >= LEAST_TEMPERATURE).any()):
            kept, cut = most_kept(params, sys.maxsize)
            self.kind = DrawKind(cut, cut and kept <= _FEW)

    def choose(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """A token of each row of [S, V], for the position that it would have, [S] int64, and those beside it: [S, 1 + n].

        Nothing waits for the device.
        """
        if self._together is not None:
            return self._together(logits, lambda whole: self._choose(whole, positions))[:, None]
        return beside(logits, self._choose(logits, positions), self._siblings)

    def _choose(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            return self._ops.greedy(logits)
        table, seeds = self._there
        kept, cut = most_kept(self._params, logits.shape[-1])
        return drawn(logits, positions, table, seeds, kept=kept, cut=cut, ops=self._ops)

    def host(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Table and seeds as `drawn` takes them, on the host: who takes best tokens needs neither."""
        return torch.from_numpy(self._params.astype(np.float32)), torch.from_numpy(self._seeds.view(np.int64))

    @functools.cached_property
    def _there(self) -> tuple[torch.Tensor, torch.Tensor]:
        table, seeds = self.host()
        return to_device(table, self._device), to_device(seeds, self._device)


class CapturedDraws:
    """What a graph for `size` items reads: `fill` comes before each replay. siblings: as of `GuessDraws`."""

    def __init__(self, kind: DrawKind, size: int, *, ops: OpTable, device: torch.device, siblings: int = 0) -> None:
        self._kind, self._ops, self._siblings = kind, ops, siblings
        self._table = torch.zeros(4, size, dtype=torch.float32, device=device)
        self._seeds = torch.zeros(size, dtype=torch.int64, device=device)

    def fill(self, draws: GuessDraws) -> None:
        """With those of a step; padding takes its best token."""
        for kept, told in zip((self._table, self._seeds), draws.host(), strict=True):
            kept.copy_(pinned(F.pad(told, (0, kept.shape[-1] - told.shape[-1])), kept.device), non_blocking=True)

    def choose(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As `GuessDraws.choose`. Device work only."""
        vocab_size = logits.shape[-1]
        kept = min(_FEW, vocab_size) if self._kind.few else vocab_size
        chosen = drawn(logits, positions, self._table, self._seeds, kept=kept, cut=self._kind.cut, ops=self._ops)
        return beside(logits, chosen, self._siblings)


def beside(logits: torch.Tensor, chosen: torch.Tensor, count: int) -> torch.Tensor:
    """`chosen`, [S], and of each row of [S, V] the `count` likeliest others: [S, 1 + count] int64. Device work only."""
    if not count:
        return chosen[:, None]
    return torch.cat((chosen[:, None], logits.scatter(1, chosen[:, None], -math.inf).topk(count).indices), 1)


def verified_order(guesses: Sequence[torch.Tensor]) -> torch.Tensor:
    """What was chosen at each depth, [S, 1 + n] each, as it is verified: the guesses, then those beside them, [S, d * (1 + n)]."""
    by_depth = torch.stack(tuple(guesses), 1)  # [S, d, 1 + n]
    chain = by_depth[:, :, 0]
    return chain if by_depth.shape[2] == 1 else torch.cat((chain, by_depth[:, :, 1:].flatten(1)), 1)


def drawn(
    logits: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, seeds: torch.Tensor, *, kept: int, cut: bool, ops: OpTable
) -> torch.Tensor:
    """A token of each row of [S, V], by its parameters, [4, S], its seed and its position, [S] each; see `SamplingTensors`."""
    numbers = uniform_on_device(seeds, positions).float()
    draws = SamplingTensors(table=torch.cat((table, numbers[None])), most_kept=kept, cut=cut)
    return ops.draw_rows(logits, draws)


class ForcedAcceptance:
    """Acceptance by chance, for benchmarks of draft models without trained weights. Everything else runs at its full cost; answers
    mean nothing. B requests, N rows each: a root and N - 1 drafts.

    rates: how often the draft at each place is right, if those before it are; later drafts are always wrong.
    """

    def __init__(self, rates: Sequence[float], device: torch.device) -> None:
        self._rates = torch.tensor(rates, dtype=torch.float32, device=device)
        rows, positions = (torch.arange(count, device=device) for count in (_ROWS, _POSITIONS))
        self._drawn = uniform_on_device(rows[:, None], positions).float()

    def tokens(self, tokens: torch.Tensor, sampled: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The rows' inputs, each draft replaced by what its row before drew, or by no token. [B, N] int64 each, as the result.

        It follows from the request's row in the batch and the draft's position alone. Runs on the device; nothing is copied.
        """
        count = min(tokens.shape[1] - 1, len(self._rates))
        rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None] % _ROWS
        is_right = self._drawn[rows, positions[:, 1 : 1 + count] % _POSITIONS] < self._rates[:count]
        forced = torch.cat((tokens[:, :1], torch.where(is_right, sampled[:, :count], _NO_TOKEN)), 1)
        return F.pad(forced, (0, tokens.shape[1] - forced.shape[1]), value=_NO_TOKEN)
