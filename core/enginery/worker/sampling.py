"""From logits to tokens. A row's token depends on its logits, its parameters, its seed and its position, and on no other row.

S rows, V vocabulary. A random row has one uniform number, a hash of (seed, position), and its tokens' noise follows from that: so
nothing has to be remembered between steps, and a request that is preempted, or runs in other company, gets the same. What a row is
sampled by comes as values (`SamplingInput`); who asked for it is not known here. Log-probabilities are computed with the step, and
read when its tokens are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from enginery.contracts.ops import LEAST_TEMPERATURE, OpTable, SamplingTensors
from enginery.contracts.request import TokenLogprob
from enginery.contracts.step import Entries, PromptTargets, SamplingInput
from enginery.kv.upload import to_device

_NOTHING = float("-inf")
NAN_TOKEN: Final = -1
_GOLDEN, _STRIDE, *_MIXING = (
    number - (1 << 64)  # as int64: the highest bit is set in all
    for number in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A number in [0, 1) of each seed and position, [S] uint64, from SplitMix64 (Steele et al., OOPSLA 2014). [S] float64."""
    x: np.ndarray = seeds * 0x9E3779B97F4A7C15 + positions * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15  # modulo 2^64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = (x ^ (x >> 31)) >> 11
    return x * 2.0**-53


def uniform_on_device(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The same numbers as `uniform`, of int64 with the same bits, which may be broadcast. float64."""
    x = seeds * _GOLDEN + positions * _STRIDE + _GOLDEN  # modulo 2^64
    x = (x ^ _shifted(x, 30)) * _MIXING[0]
    x = (x ^ _shifted(x, 27)) * _MIXING[1]
    return _shifted(x ^ _shifted(x, 31), 11).double() * 2.0**-53


def _shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """To the right, with zeros: int64 shifts copy the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def sample(
    logits: torch.Tensor, sampling: SamplingInput | None, *, ops: OpTable, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """Choose a token for each row of [S, V]; None: that of its largest logit. Returns [S] int64 on the same device.

    positions: [S] int64, device, in place of those that the host gives, where it does not know them.
    """
    if sampling is None:
        return ops.greedy(logits)
    if sampling.adjusts:
        logits = _adjusted(logits, sampling)
    if (sampling.params[0] < LEAST_TEMPERATURE).all():
        return ops.greedy(logits)
    return ops.draw_rows(logits, _draws(sampling, logits, positions))


def mark_nan(logits: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """`sampled` [S] with `NAN_TOKEN` where the logits that a token was chosen from, of [S, V], are NaN."""
    return sampled.masked_fill(logits.gather(1, sampled[:, None]).squeeze(1).isnan(), NAN_TOKEN)


def _adjusted(logits: torch.Tensor, sampling: SamplingInput) -> torch.Tensor:
    """A copy of [S, V] in float32 with penalties, biases and what is forbidden. Nothing waits for the device."""
    logits = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    flat = logits.view(-1)  # [S * V]
    if sampling.repetition is not None:
        places, penalties = _upload(sampling.repetition, logits)
        values = flat[places]
        flat[places] = torch.where(values > 0, values / penalties, values * penalties)
    if sampling.penalties is not None:
        places, penalties = _upload(sampling.penalties, logits)
        flat[places] -= penalties
    if sampling.biases is not None:
        places, biases = _upload(sampling.biases, logits)
        flat[places] += biases
    if sampling.forbidden is not None:
        flat.index_fill_(0, _upload(sampling.forbidden, logits)[0], _NOTHING)
    if sampling.mask is not None:
        words = to_device(torch.from_numpy(sampling.mask), logits.device)  # [S, W] int32, a bit for each token
        bits = (words.view(torch.uint8)[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1  # [S, 4 W, 8]
        logits.masked_fill_(bits.flatten(1)[:, : logits.shape[-1]] == 0, _NOTHING)
    return logits


def _upload(entries: Entries, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places in the flattened logits, [E] int64, and values, [E] float32, on their device."""
    rows, tokens = entries.at
    places = to_device(torch.from_numpy(rows * logits.shape[-1] + tokens), logits.device)
    return places, to_device(torch.from_numpy(entries.values).to(logits.dtype), logits.device)


def _draws(sampling: SamplingInput, logits: torch.Tensor, positions: torch.Tensor | None) -> SamplingTensors:
    """One upload for all rows, and another where the device has the positions, without waiting for it."""
    table = np.empty((5, len(logits)), np.float32)
    table[:4] = sampling.params
    table[4] = uniform(sampling.seeds, sampling.positions)
    kept, cut = most_kept(sampling.params, logits.shape[-1])
    there = to_device(torch.from_numpy(table), logits.device)
    if positions is not None:
        seeds = to_device(torch.from_numpy(sampling.seeds.astype(np.int64)), logits.device)
        there[4] = uniform_on_device(seeds, positions)
    return SamplingTensors(table=there, most_kept=kept, cut=cut)


def most_kept(params: np.ndarray, vocab_size: int) -> tuple[int, bool]:
    """Of `SamplingTensors`: how many tokens a row keeps at most, and whether any row drops some. params: [4, S]."""
    (_, least_k, least_p, _), (_, most_k, _, most_min_p) = params.min(1).tolist(), params.max(1).tolist()
    return min(int(most_k), vocab_size) if least_k else vocab_size, most_k > 0 or least_p < 1 or most_min_p > 0


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


def prompt_logprob_tables(
    logits_of: Callable[[torch.Tensor], torch.Tensor], targets: PromptTargets, hidden: torch.Tensor
) -> list[LogprobTable]:
    """What the rows of a prompt's chunk say of the tokens that follow them. hidden: [n, C], of at least as many rows as targets."""
    tables: list[LogprobTable] = []
    for begin, count in row_blocks(len(targets.token_ids)):
        following = to_device(torch.from_numpy(targets.token_ids[begin : begin + count]), hidden.device)
        logits = logits_of(hidden[begin : begin + count])
        tables.append(token_logprobs(logits, following, [targets.num_top] * len(following)))
    return tables
