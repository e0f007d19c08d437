"""How the rows of a step are sampled, as values: from what requests ask for, what they have said, and what their grammars allow.

S rows that sample, V vocabulary, W = ceil(V / 32) words of a mask: a bit for each token, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from enginery.contracts.grammars import GrammarState
from enginery.contracts.request import SamplingParams
from enginery.contracts.step import Entries, Items, PromptTargets, SamplingInput, StepInput, pack_params, unpack_params
from enginery.engine.grammar_budget import RevocableBoundedState
from enginery.engine.grammars_ahead import ALL, DraftMasks, GrammarAhead
from enginery.errors import RequestError
from enginery.schedule.adjustments import Adjustments
from enginery.schedule.request import Request, RequestStatus
from enginery.worker.drafts.trees import depths_of, ways_of
from enginery.worker.layout import drafts_of_items, places_within


class SamplingRow(NamedTuple):
    """One row to sample, the token at `position` of its request: behind those that are told, and `drafts`.

    A tuple, because a step has hundreds. adjustments: of the request.
    """

    adjustments: Adjustments
    position: int
    grammar: GrammarState | GrammarAhead | None = None  # has accepted the output before it
    drafts: Sequence[int] = ()

    @property
    def params(self) -> SamplingParams:
        """What the request asks for."""
        return self.adjustments.params

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated before it."""
        return self.position - self.adjustments.num_prompt_tokens


class GrammarFailures(NamedTuple):
    """What grammars could not say of a step, by item. refused: what comes next, and why; these requests end.

    cuts: what comes behind a draft: how many tokens the step may tell of the item. The row behind these was sampled without a mask.
    If the request gets there, it is a decoding row of the next step, and then the grammar answers for it.
    """

    refused: Mapping[int, str]
    cuts: Mapping[int, int]


NO_FAILURES = GrammarFailures({}, {})


def prepare_sampling(
    step: StepInput, requests: Sequence[Request], eos_token_ids: frozenset[int], *, vocab_size: int
) -> tuple[SamplingInput | None, GrammarFailures]:
    """Of a step whose forward is on its way: grammars are asked while the device works.

    None: every row takes its best token, and nothing is reported beside it.
    """
    if step.run.tokens_only:
        return None, NO_FAILURES
    items, places = step.columns(), step.sampling.repeat(step.sampled_rows).tolist()
    asked = [requests[index] for index in places]
    ahead = places_within(step.sampled_rows)
    if step.parents:
        depths = depths_of(step).ravel()
        ahead[: len(depths)] = depths
    positions = ((items.start + items.num_tokens - items.num_drafts)[places] + ahead).astype(np.uint64)
    prompts = _prompt_targets(items, requests)
    if any(request.adjusts or request.grammar is not None for request in asked):
        rows = _rows(step, requests, positions.tolist())
        values, failed = sampling_input(rows, eos_token_ids, vocab_size=vocab_size, prompts=prompts)
        return values, _failures_by_item(failed, places, ahead)
    params, seeds = unpack_params([request.packed_params for request in asked])  # packed when they came
    num_top = _num_top([request.asked.params.logprobs for request in asked])
    return SamplingInput(params=params, seeds=seeds, positions=positions, num_top=num_top, prompts=prompts), NO_FAILURES


def reads_pending(step: StepInput, requests: Sequence[Request]) -> bool:
    """Whether a token is chosen by one that is still to come."""
    if not any(request.reads_tokens for request in requests):
        return False
    return any(count and request.reads_tokens for count, request in zip(step.columns().pending.tolist(), requests, strict=True))


def _failures_by_item(failed: Mapping[int, str], places: Sequence[int], ahead: np.ndarray) -> GrammarFailures:
    """failed: by row. places, ahead: the item of each row, and how many rows lead to it."""
    cuts: dict[int, int] = {}
    for row in failed:
        cuts[places[row]] = min(int(ahead[row]), cuts.get(places[row], int(ahead[row])))
    refused = {places[row]: why for row, why in failed.items() if not ahead[row]}
    return GrammarFailures(refused, {item: most for item, most in cuts.items() if most})


def sampling_input(
    rows: Sequence[SamplingRow],
    eos_token_ids: frozenset[int],
    *,
    vocab_size: int,
    prompts: Mapping[int, PromptTargets] | None = None,
) -> tuple[SamplingInput, Mapping[int, str]]:
    """The rows as arrays, and why grammars of some cannot go on. Each `params.seed` is set."""
    words, failed = fill_masks(rows, eos_token_ids, vocab_size=vocab_size)
    params, seeds = unpack_params([pack_params(row.params) for row in rows])
    values = SamplingInput(
        params=params,
        seeds=seeds,
        positions=np.array([row.position for row in rows], np.uint64),
        repetition=_entries(rows, _repetition),
        penalties=_entries(rows, _penalties),
        biases=_entries(rows, _biases),
        forbidden=_entries(rows, lambda row: _forbidden(row, eos_token_ids)),
        mask=words,
        num_top=_num_top([row.params.logprobs for row in rows]),
        prompts=prompts or {},
    )
    return values, failed


def fill_masks(
    rows: Sequence[SamplingRow], eos_token_ids: frozenset[int], *, vocab_size: int
) -> tuple[np.ndarray | None, Mapping[int, str]]:
    """Ask each row's grammar: [S, W] int32, the lowest bit first; a row without one has all bits. None: no row has one.

    And the rows that cannot go on, and why.
    """
    if all(row.grammar is None for row in rows):
        return None, {}
    words = np.full((len(rows), -(-vocab_size // 32)), ALL, dtype=np.int32)
    failed: dict[int, str] = {}
    for index, row in enumerate(rows):
        if row.grammar is None:
            continue
        try:
            row.grammar.fill_mask(words[index])
            _put_off_end(words[index], row, eos_token_ids)
            if not words[index].any():
                raise RequestError("the grammar allows no token here, not even the end")
        except RequestError as error:
            failed[index] = str(error)
            words[index] = ALL  # what it samples is dropped
    return words, failed


def _put_off_end(mask: np.ndarray, row: SamplingRow, eos_token_ids: frozenset[int]) -> None:
    """Where `min_tokens` or `ignore_eos` forbid the end, it comes only if the grammar allows nothing else. mask: [W]."""
    is_early, kept = row.num_output_tokens < row.params.min_tokens, mask.copy()
    ends = row.adjustments.ends(eos_token_ids) if is_early else np.array([], np.int64)
    if row.params.ignore_eos:
        ends = np.append(ends, np.array([*eos_token_ids], np.int64))
    np.bitwise_and.at(kept.view(np.uint32), ends >> 5, ~(np.uint32(1) << (ends & 31).astype(np.uint32)))
    if kept.any():
        mask[:] = kept


def _num_top(asked: Sequence[int | None]) -> tuple[int, ...]:
    return () if asked.count(None) == len(asked) else tuple(-1 if count is None else count for count in asked)


def _rows(step: StepInput, requests: Sequence[Request], positions: Sequence[int]) -> list[SamplingRow]:
    """Each row that is sampled; those of drafts as if the drafts before them had been told."""
    drafts, rows = drafts_of_items(step), list[SamplingRow]()
    ways = ways_of(step) if step.parents else None
    for index, count in zip(step.sampling.tolist(), step.sampled_rows.tolist(), strict=True):
        request, position = requests[index], positions[len(rows)]
        grammar = None if request.status is RequestStatus.FINISHED else request.grammar  # its end may be new since it was scheduled
        row = SamplingRow(request.adjustments, position, grammar)
        rows.append(row)
        if count > 1 and ways is not None:
            rows += _rows_of_tree(row, drafts[index], ways[index], count - 1)
        elif count > 1:
            rows += _rows_behind(row, drafts[index], count - 1)
    return rows


def _rows_of_tree(row: SamplingRow, drafts: Sequence[int], ways: Sequence[Sequence[int]], count: int) -> list[SamplingRow]:
    """The same where drafts branch: of each one behind those on its way. ways: see `ways_of`."""
    behind: dict[int, SamplingRow] = {}
    for way in reversed(ways):  # leaves first: a grammar is asked once for all on the way of one
        if way[-1] not in behind:
            found = _rows_behind(row, [drafts[place - 1] for place in way], len(way))
            behind |= dict(zip(way, found, strict=True))
    rows = [behind[place] for place in range(1, 1 + len(drafts))]
    return [*rows, *[row._replace(grammar=None)] * (count - len(rows))]


def _rows_behind(row: SamplingRow, drafts: Sequence[int], count: int) -> list[SamplingRow]:
    """`count` rows: behind each draft one, then padding."""
    masks = None if row.grammar is None else DraftMasks(cast("RevocableBoundedState", row.grammar), drafts)
    behind = [
        row._replace(
            position=row.position + ahead,
            grammar=None if masks is None else GrammarAhead(masks, ahead),
            drafts=drafts[:ahead],
        )
        for ahead in range(1, 1 + len(drafts))
    ]
    return [*behind, *(row._replace(position=row.position + 1 + ahead, grammar=None) for ahead in range(len(drafts), count))]


def _prompt_targets(items: Items, requests: Sequence[Request]) -> dict[int, PromptTargets]:
    """Of the items whose prompts' log-probabilities are asked for: what follows their rows, as far as it is the prompt.

    Output tokens that are computed again are left out.
    """
    found: dict[int, PromptTargets] = {}
    for index in np.flatnonzero(items.num_logits > items.samples + items.num_drafts).tolist():
        request, end = requests[index], int(items.start[index] + items.num_tokens[index])
        following = request.token_ids[end - int(items.num_logits[index]) + 1 : min(end + 1, request.num_prompt_tokens)]
        num_top = request.asked.params.prompt_logprobs or 0
        found[index] = PromptTargets(token_ids=np.array(following, np.int64), num_top=num_top)
    return found


_Adjustment = tuple[np.ndarray, np.ndarray]  # tokens, and a value for each


def _entries(rows: Sequence[SamplingRow], find: Callable[[SamplingRow], _Adjustment | None]) -> Entries | None:
    """What `find` says of each row, one after the other. None: nothing of any."""
    found = [(index, adjustment) for index, row in enumerate(rows) if (adjustment := find(row)) is not None]
    if not found:
        return None
    tokens = [each for _, (each, _) in found]
    counts = [len(each) for each in tokens]
    at = np.empty((2, sum(counts)), np.int64)
    at[0] = np.repeat([index for index, _ in found], counts)
    np.concatenate(tokens, out=at[1])
    return Entries(at=at, values=np.concatenate([values for _, (_, values) in found]))


def _repetition(row: SamplingRow) -> _Adjustment | None:
    if row.params.repetition_penalty == 1:
        return None
    tokens = row.adjustments.seen.tokens(row.drafts)
    return tokens, np.full(len(tokens), row.params.repetition_penalty)


def _penalties(row: SamplingRow) -> _Adjustment | None:
    params = row.params
    if not (params.presence_penalty or params.frequency_penalty) or not row.num_output_tokens:
        return None
    told = row.adjustments.told
    return told.tokens(row.drafts), params.presence_penalty + params.frequency_penalty * told.counts(row.drafts)


def _biases(row: SamplingRow) -> _Adjustment | None:
    return row.adjustments.biases if row.params.logit_bias else None


def _forbidden(row: SamplingRow, eos_token_ids: frozenset[int]) -> _Adjustment | None:
    """The ends, as long as `min_tokens` puts them off; of a row with a grammar its mask does that."""
    if row.num_output_tokens >= row.params.min_tokens or row.grammar is not None:
        return None
    ends = row.adjustments.ends(eos_token_ids)
    return ends, np.zeros(len(ends))
