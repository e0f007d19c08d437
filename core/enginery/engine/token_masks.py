"""Which tokens the grammars of a step's rows allow: a bit for each on the host.

N rows, V vocabulary, W = ceil(V / 32) words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from enginery.engine.grammars_ahead import ALL
from enginery.errors import RequestError

if TYPE_CHECKING:
    from enginery.engine.sampling_input import SamplingRow


def fill_masks(
    rows: Sequence[SamplingRow], eos_token_ids: frozenset[int], *, vocab_size: int
) -> tuple[np.ndarray | None, Mapping[int, str]]:
    """Ask each row's grammar: [N, W] int32, the lowest bit first; a row without one has all bits. None: no row has one.

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
    ends = set(eos_token_ids) if row.params.ignore_eos else set()
    if row.num_output_tokens < row.params.min_tokens:
        ends |= {*eos_token_ids, *row.params.stop_token_ids}
    kept = mask.copy()
    for token in ends:
        kept.view(np.uint32)[token >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token & 31)))
    if kept.any():
        mask[:] = kept
