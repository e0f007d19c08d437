"""How the rows of a step are sampled, as values: from what requests ask for, what they have said, and what their grammars allow.

S rows that sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from enginery.contracts.grammars import GrammarState
from enginery.contracts.request import SamplingParams
from enginery.contracts.step import Entries, PromptTargets, SamplingInput, StepInput
from enginery.engine.token_masks import fill_masks
from enginery.schedule.request import Request, RequestStatus


class SamplingRow(NamedTuple):
    """One row to sample, the token at `position` of its request, of which the first `num_prompt_tokens` are the prompt.

    A tuple, because a step has hundreds.

    token_ids: all tokens before it, as far as they are known; what needs them is in `SamplingParams.reads_tokens`.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    position: int
    grammar: GrammarState | None = None  # has accepted the output before it

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated before it."""
        return self.position - self.num_prompt_tokens


class Prepared(NamedTuple):
    """What the worker is given; None: every row takes its best token, and nothing is reported beside it.

    refused: rows whose grammars cannot go on, and why.
    """

    sampling: SamplingInput | None
    refused: Mapping[int, str]


def prepare_sampling(step: StepInput, requests: Sequence[Request], eos_token_ids: frozenset[int], *, vocab_size: int) -> Prepared:
    """Of a step whose forward is on its way: grammars are asked while the device works. refused: by item."""
    if step.run.greedy and not any(request.reports_logprobs for request in requests):
        return Prepared(None, {})
    items, places = step.columns(), step.sampling.tolist()
    ends = items.start + items.num_tokens
    prompts = {
        index: _targets(requests[index], int(ends[index] - items.num_logits[index]), int(ends[index]))
        for index in np.flatnonzero(items.num_logits > items.samples).tolist()
    }
    asked = [requests[index] for index in places]
    every, positions = [request.asked.params for request in asked], ends[step.sampling].astype(np.uint64)
    if not any(params.adjusts for params in every) and all(request.grammar is None for request in asked):
        return Prepared(_values(every, positions, prompts=prompts), {})
    rows = [_row_of(request, position) for request, position in zip(asked, positions.tolist(), strict=True)]
    values, refused = sampling_input(rows, eos_token_ids, vocab_size=vocab_size, prompts=prompts)
    return Prepared(values, {places[row]: why for row, why in refused.items()})


def sampling_input(
    rows: Sequence[SamplingRow],
    eos_token_ids: frozenset[int],
    *,
    vocab_size: int,
    prompts: Mapping[int, PromptTargets] | None = None,
) -> Prepared:
    """The rows as arrays. Each `params.seed` is set."""
    masks = fill_masks(rows, eos_token_ids, vocab_size=vocab_size)
    values = _values(
        [row.params for row in rows],
        np.array([row.position for row in rows], np.uint64),
        prompts=prompts or {},
        repetition=_entries(rows, _repetition),
        penalties=_entries(rows, _penalties),
        biases=_entries(rows, _biases),
        forbidden=_entries(rows, lambda row: _forbidden(row, eos_token_ids)),
        mask=None if masks is None else masks.words,
    )
    return Prepared(values, {} if masks is None else masks.failed)


def _values(
    every: Sequence[SamplingParams],
    positions: np.ndarray,
    *,
    prompts: Mapping[int, PromptTargets],
    mask: np.ndarray | None = None,
    **entries: Entries | None,
) -> SamplingInput:
    """entries: by the names of their fields, none where no logit is changed."""
    packed = b"".join([params.packed for params in every])
    asked = [params.logprobs for params in every]
    return SamplingInput(
        params=np.frombuffer(packed, "<f8").reshape(-1, 5)[:, :4].T,
        seeds=np.frombuffer(packed, "<u8")[4::5],
        positions=positions,
        mask=mask,
        num_top=() if asked.count(None) == len(asked) else tuple(-1 if count is None else count for count in asked),
        prompts=prompts,
        **entries,
    )


def _row_of(request: Request, position: int) -> SamplingRow:
    grammar = None if request.status is RequestStatus.FINISHED else request.grammar  # its end may be new since it was scheduled
    return SamplingRow(request.asked.params, request.token_ids, request.num_prompt_tokens, position, grammar)


def _targets(request: Request, first: int, end: int) -> PromptTargets:
    """What follows the rows `first .. end - 1`, as far as it is the prompt; output tokens that are computed again are left out."""
    following = request.token_ids[first + 1 : min(end + 1, request.num_prompt_tokens)]
    return PromptTargets(token_ids=np.array(following, np.int64), num_top=request.asked.params.prompt_logprobs or 0)


_Adjustment = tuple[Sequence[int] | np.ndarray, Sequence[float] | np.ndarray | float]  # tokens, and a value for each or for all


def _entries(rows: Sequence[SamplingRow], find: Callable[[SamplingRow], _Adjustment | None]) -> Entries | None:
    """What `find` says of each row, one after the other. None: nothing of any."""
    found = [(index, adjustment) for index, row in enumerate(rows) if (adjustment := find(row)) is not None]
    if not found:
        return None
    tokens = [np.asarray(each, np.int64) for _, (each, _) in found]
    at = np.repeat([index for index, _ in found], [len(each) for each in tokens])
    values = [
        np.broadcast_to(np.asarray(value, np.float64), len(each)) for each, (_, (_, value)) in zip(tokens, found, strict=True)
    ]
    return Entries(at=np.stack([at, np.concatenate(tokens)]), values=np.concatenate(values))


def _repetition(row: SamplingRow) -> _Adjustment | None:
    if row.params.repetition_penalty == 1:
        return None
    return np.unique(np.asarray(row.token_ids, np.int64)), row.params.repetition_penalty


def _penalties(row: SamplingRow) -> _Adjustment | None:
    params = row.params
    if not (params.presence_penalty or params.frequency_penalty) or not row.num_output_tokens:
        return None
    output, counts = np.unique(np.asarray(row.token_ids[row.num_prompt_tokens :], np.int64), return_counts=True)
    return output, params.presence_penalty + params.frequency_penalty * counts


def _biases(row: SamplingRow) -> _Adjustment | None:
    bias = row.params.logit_bias
    return (list(bias), list(bias.values())) if bias else None


def _forbidden(row: SamplingRow, eos_token_ids: frozenset[int]) -> _Adjustment | None:
    """The ends, as long as `min_tokens` puts them off; of a row with a grammar its mask does that."""
    params = row.params
    if row.num_output_tokens >= params.min_tokens or row.grammar is not None:
        return None
    return sorted({*params.stop_token_ids} if params.ignore_eos else {*params.stop_token_ids, *eos_token_ids}), 0.0
