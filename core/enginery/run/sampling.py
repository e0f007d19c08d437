"""From logits to tokens. A row's token depends on its logits, its parameters, its seed and its position, and on no other row.

N rows, V vocabulary. A random row draws one uniform number by hashing (seed, position), so nothing has to be remembered between
steps: a request that is preempted, or runs in other company, gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from enginery.contracts.request import SamplingParams, TokenLogprob

_MASK64 = (1 << 64) - 1
_NOTHING = float("-inf")
LEAST_TEMPERATURE = 1e-5  # dividing logits by less overflows, and the best token has all of the probability long before


@dataclass(frozen=True, kw_only=True)
class SamplingRow:
    """One row to sample, the token at `position` of its request, of which the first `num_prompt_tokens` are the prompt.

    token_ids: all tokens before it, as far as they are known; what needs them is in `reads_tokens`.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    position: int

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated before it."""
        return self.position - self.num_prompt_tokens


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from SplitMix64 (Steele et al., OOPSLA 2014) over both."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return ((x ^ (x >> 31)) >> 11) * 2.0**-53


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow], eos_token_ids: frozenset[int]) -> torch.Tensor:
    """Choose a token for each row. logits: [N, V]. Every row's `params.seed` is set. Returns [N] int64 on the same device."""
    adjusted = [index for index, row in enumerate(rows) if _is_adjusted(row)]
    if adjusted:
        logits = logits.to(torch.float32, copy=True)
        for index in adjusted:
            _adjust(logits[index], rows[index], eos_token_ids)
    random = [index for index, row in enumerate(rows) if row.params.temperature >= LEAST_TEMPERATURE]
    if not random:
        return logits.argmax(-1)
    chosen = logits.argmax(-1) if len(random) < len(rows) else torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    cut = [index for index in random if _is_cut(rows[index].params)]
    whole = [index for index in random if not _is_cut(rows[index].params)]
    for indices, draw in ((whole, _draw_whole), (cut, _draw_cut)):
        picked = [rows[index] for index in indices]
        temperatures = [row.params.temperature for row in picked]
        if len(indices) == len(rows):
            return draw(logits.float() / _column(temperatures, logits), picked)
        if indices:
            where = _on_device(torch.tensor(indices), logits.device)
            chosen[where] = draw(logits[where].float() / _column(temperatures, logits), picked)
    return chosen


def reads_tokens(params: SamplingParams) -> bool:
    """Whether a token's choice depends on which tokens came before."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _is_adjusted(row: SamplingRow) -> bool:
    return reads_tokens(row.params) or bool(row.params.logit_bias) or row.num_output_tokens < row.params.min_tokens


def _adjust(logits: torch.Tensor, row: SamplingRow, eos_token_ids: frozenset[int]) -> None:
    """Penalties, bias and `min_tokens`, in place on [V] float32."""
    params, device = row.params, logits.device
    if params.repetition_penalty != 1:
        seen = torch.unique(torch.tensor(row.token_ids, dtype=torch.int64, device=device))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.num_output_tokens:
        output = torch.tensor(row.token_ids[row.num_prompt_tokens :], dtype=torch.int64, device=device)
        seen, counts = torch.unique(output, return_counts=True)
        logits[seen] -= params.presence_penalty + params.frequency_penalty * counts.to(logits.dtype)
    if params.logit_bias:
        biased = torch.tensor(list(params.logit_bias), device=device)
        logits[biased] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=device)
    if row.num_output_tokens < params.min_tokens:
        ends = set(params.stop_token_ids) if params.ignore_eos else {*params.stop_token_ids, *eos_token_ids}
        logits[torch.tensor(sorted(ends), dtype=torch.int64, device=device)] = _NOTHING


def _is_cut(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return _on_device(torch.tensor(values, dtype=torch.float32), like.device)[:, None]  # [N, 1]


def _on_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Without waiting for the device."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def _invert(weights: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Inverse transform sampling: the first column whose cumulative weight exceeds u times the total. [N, V] -> [N, 1].

    A u that rounds to 1 would end beyond the last column, or on one without weight; it gets the last one that has some.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    last = torch.searchsorted(cumulative, total)  # the first column to reach it
    drawn = _column([uniform(row.params.seed or 0, row.position) for row in rows], weights)
    target = drawn * total
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)


def _draw_whole(scaled: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    return _invert(scaled.softmax(-1), rows).squeeze(1)


def _draw_cut(scaled: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """top_k, then top_p (arXiv:1904.09751) and min_p (arXiv:2407.01082) of what it left, over the tokens in falling order."""
    vocab_size = scaled.shape[-1]
    top_k = [min(row.params.top_k or vocab_size, vocab_size) for row in rows]
    best, tokens = scaled.topk(max(top_k), dim=-1)  # [N, k]
    rank = torch.arange(best.shape[-1], device=best.device)
    best = best.masked_fill(rank >= _column(top_k, best), _NOTHING)
    weights = best.softmax(-1)
    before = weights.cumsum(-1) - weights  # probability of the likelier ones
    dropped = before >= _column([row.params.top_p for row in rows], best)
    dropped |= weights < weights[:, :1] * _column([row.params.min_p for row in rows], best)
    dropped[:, 0] = False
    return tokens.gather(1, _invert(weights.masked_fill(dropped, 0), rows)).squeeze(1)


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> list[TokenLogprob]:
    """The log-probability of `token_ids` [N] under [N, V] and each row's `num_top` likeliest ones, before any adjustment."""
    table = logits.float().log_softmax(-1)
    own = table.gather(1, token_ids[:, None]).squeeze(1).tolist()
    best, ids = table.topk(min(max(num_top), table.shape[-1]), dim=-1)
    best_rows, id_rows = best.tolist(), ids.tolist()
    return [
        TokenLogprob(token_id=token, logprob=own[row], top=tuple(zip(id_rows[row][:count], best_rows[row][:count], strict=True)))
        for row, (token, count) in enumerate(zip(token_ids.tolist(), num_top, strict=True))
    ]
