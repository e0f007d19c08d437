"""Calls of what draws tokens, for `enginery.nn.op_cases`: with numbers for which rounding changes no token.

N rows, V vocabulary, M numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from enginery.contracts.ops import SamplingTensors
from enginery.nn.reference_ops import exponentials

if TYPE_CHECKING:
    from enginery.nn.op_cases import Inputs, OpFn, Results

_NUMBERS: Final = 128  # of which a row has one
_APART: Final = 0.01  # how far the drawn token is above the next one, at least


class Cuts(NamedTuple):
    """How a row is sampled, as in `SamplingTensors`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


CUTS: Final = (Cuts(), Cuts(0.6), Cuts(top_k=5), Cuts(top_p=0.5), Cuts(1.5, 20, 0.9, 0.1), Cuts(0.0, top_p=0.9))
MIXED: Final[Mapping[str, tuple[Cuts, ...]]] = {
    "temperatures": (Cuts(0.5), Cuts(), Cuts(0.0), Cuts(2.0)),
    "top_k": (Cuts(top_k=2), Cuts(0.7, 20), Cuts(2.0, 9, 0.9, 0.02)),
    "cuts": (Cuts(0.5, 3, 0.4, 0.3), Cuts(0.0, top_p=0.9), *CUTS[:-1]),
}


def sample_rows(op: OpFn, given: Inputs, *, rows: int, size: int, cuts: Cuts, place: float = 0.5) -> Results:
    """One row repeated, drawn from within the kept tokens' shares, so that rounding moves no draw to another token."""
    logits = given.randn(1, size, scale=2.0)
    uniform = _places(logits[0], cuts, place).repeat(rows)[:rows]
    return _sampled(op, given, logits.expand(rows, -1).contiguous(), [cuts] * rows, uniform)


def sample_mixed(op: OpFn, given: Inputs, *, size: int, mixed: str) -> Results:
    """No two rows have the same logits, about half of which are masked, or are sampled alike."""
    rows = MIXED[mixed]
    logits = given.masked(given.randn(len(rows), size, scale=2.0))
    return _sampled(op, given, logits, rows, torch.stack([each[len(each) * 2 // 3] for each in map(_places, logits, rows)]))


def draw_rows(op: OpFn, given: Inputs, *, rows: int, size: int, cuts: Cuts) -> Results:
    """One row repeated. With the number of each, other cuts or another temperature would give another token, where there is one."""
    logits = given.randn(1, size, scale=2.0)
    others = (
        cuts._replace(top_k=cuts.top_k + 1),
        cuts._replace(top_k=max(cuts.top_k - 1, 1)),
        cuts._replace(temperature=1.3 * cuts.temperature),
        cuts._replace(top_p=0.9 * cuts.top_p),
        cuts._replace(min_p=cuts.min_p + 0.1),
    )
    uniform = torch.stack([_telling(logits[0], cuts, [other]) for other in others])
    return _sampled(op, given, logits.expand(rows, -1).contiguous(), [cuts] * rows, uniform.repeat(rows)[:rows])


def draw_mixed(op: OpFn, given: Inputs, *, size: int, mixed: str) -> Results:
    """As `sample_mixed`. With another row's temperature or cuts most rows would have another token."""
    rows = MIXED[mixed]
    logits = given.masked(given.randn(len(rows), size, scale=2.0))
    swaps = [{name: value} for other in (rows[0], rows[-1]) for name, value in other._asdict().items()]
    swapped = ([row._replace(**swap) for swap in swaps] for row in rows)
    return _sampled(op, given, logits, rows, torch.stack([*map(_telling, logits, rows, swapped)]))


def _sampled(op: OpFn, given: Inputs, logits: torch.Tensor, rows: Sequence[Cuts], uniform: torch.Tensor) -> Results:
    table = torch.cat((torch.tensor(rows).T, uniform[None]))
    kept = int(table[1].max()) if bool(table[1].all()) else logits.shape[1]
    cut = bool((table[1:4] != torch.tensor(Cuts())[1:, None]).any())
    return {"ids": op(logits, SamplingTensors(table=table.to(given.device), most_kept=kept, cut=cut))}


def _kept(logits: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """The share of each token that is kept, of all, and 0 of the others, by a sort in float64, on the host: [V]."""
    temperature, top_k, top_p, min_p = cuts if cuts.temperature > 0 else Cuts(top_k=1)
    values, order = (logits.double().cpu() / temperature).sort(descending=True, stable=True)
    weights = values.softmax(-1)
    if top_k:
        weights[top_k:] = 0
        weights /= weights.sum()
    dropped = (weights.cumsum(-1) - weights >= top_p) | (weights < weights[0] * min_p)
    dropped[0] = False
    return torch.zeros_like(weights).scatter(0, order, weights.masked_fill(dropped, 0))


def _places(logits: torch.Tensor, cuts: Cuts, place: float = 0.5) -> torch.Tensor:
    """Where `sample_rows` draws each token that is kept with no tiny share. place: in its share, [0, 1]."""
    kept = _kept(logits, cuts)
    return ((kept.cumsum(0) - kept * (1 - place)) / kept.sum())[kept > 1e-3].float()


def _telling(logits: torch.Tensor, cuts: Cuts, others: Sequence[Cuts]) -> torch.Tensor:
    """The number, [], for which most of the others would have `draw_rows` give another token of [V]."""
    numbers, noise = _noise(len(logits))
    best, tokens = (_kept(logits, cuts).log() - noise).topk(2)  # [M, 2]
    told = [(_kept(logits, other).log() - noise).argmax(1) != tokens[:, 0] for other in others]
    return numbers[((1 + torch.stack(told).sum(0)) * (best[:, 0] > best[:, 1] + _APART)).argmax()]


@functools.lru_cache(1)
def _noise(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers, [M], and what each takes from the logarithm of every token's share: [M, V]. Calls of one size follow each other."""
    numbers = (torch.arange(_NUMBERS) + 0.5) / _NUMBERS
    return numbers, exponentials(numbers, size).double().log_()
