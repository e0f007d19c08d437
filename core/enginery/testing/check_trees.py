"""The rule about drafts that branch: each row sees what `verify_mask` is told, and nothing else changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from enginery.contracts.batch import ForwardBatch, Phase
from enginery.contracts.plan import VerifyMask
from enginery.testing.cases import AttnCase
from enginery.testing.rules import BrokenRule, SkippedCheck, compare, rule
from enginery.testing.stage import Turn
from enginery.testing.subject import Subject, tree_cases
from enginery.testing.workbench import Workbench
from enginery.worker.drafts.trees import seen_of

# The row before each row: a chain, leaves of one root, branches of which the right one is not the first, and all of these at once.
_PARENTS: Final = np.array([[0, 0, 1, 2, 3], [0, 0, 0, 0, 0], [0, 0, 0, 2, 3], [0, 0, 1, 0, 2]])
_ROWS: Final = _PARENTS.shape[1]


@rule(tree_cases, "Keep the masks in the plan, look at them in attend, and only for a request's last keys; or do not claim trees.")
def trees_of_drafts(subject: Subject, case: AttnCase) -> None:
    """Rows of drafts that branch see what is before them and what verify_mask is told; chunks beside them stay causal."""
    if not subject.can.trees:
        raise SkippedCheck("capabilities do not claim them")
    for phase in sorted(subject.can.phases & {Phase.VERIFY, Phase.MIXED}):
        bench = Workbench(subject, case)
        first, second = (_turns(bench, phase) for _ in range(2))
        plain = [bench.batch(turns, phase) for turns in (first, second)]
        batches = [bench.relay.plan(dataclasses.replace(batch, decode_len=_ROWS, trees=True)) for batch in plain]
        for batch, parents in zip(batches, (_PARENTS, _PARENTS[::-1]), strict=True):
            _write(bench, batch, parents)
        for batch, turns, parents in zip(batches, (first, second), (_PARENTS, _PARENTS[::-1]), strict=True):
            expected = [expected_of_tree(bench, turn, parents[index]) for index, turn in enumerate(turns[: len(parents)])]
            expected += [bench.expected(turn) for turn in turns[len(parents) :]]
            what = f"{phase} of trees of {_ROWS} rows"
            compare(bench.attend(batch, turns), expected, dtype=case.dtype, leeway=case.leeway, what=what)


def _turns(bench: Workbench, phase: Phase) -> list[Turn]:
    """Requests that verify, and in a mixed batch chunks beside them, one of which is as long."""
    page = bench.case.page_size
    turns = bench.turns([(cached, _ROWS) for cached in (page - 1, 0, 2 * page + 3, 40)])
    return turns + (bench.turns([(7, _ROWS), (0, 9), (3, 1)]) if phase is Phase.MIXED else [])


def _write(bench: Workbench, batch: ForwardBatch, parents: np.ndarray) -> None:
    """As the core does it. Raises `BrokenRule` where the buffers are not those of the requests that verify."""
    masks = bench.relay.ask("verify_mask", plan=batch.plan)
    if not isinstance(masks, VerifyMask):
        raise BrokenRule(f"{batch.phase}: verify_mask answers {masks!r:.60} for a batch with trees")
    count = batch.num_decode_requests
    causal = np.broadcast_to(np.tri(_ROWS, dtype=bool), (count - len(parents), _ROWS, _ROWS))
    seen, found = torch.from_numpy(np.concatenate((seen_of(parents), causal))), list[int]()
    for requests, buffer in masks.parts:
        shape, wanted = tuple(buffer.shape), (requests.stop - requests.start, _ROWS, _ROWS)
        if shape != wanted or buffer.dtype != torch.bool:
            raise BrokenRule(f"{batch.phase}: verify_mask has {buffer.dtype} of {shape}, not bool of {wanted}")
        found += range(requests.start, requests.stop)
        buffer.copy_(seen[requests])
    if found != list(range(count)):
        raise BrokenRule(f"{batch.phase}: verify_mask has masks of the requests {found}, and {count} from the first on verify")


def expected_of_tree(bench: Workbench, turn: Turn, parents: Sequence[int]) -> torch.Tensor:
    """Of each row as if those on its way from the first were all that follow the cached tokens: [rows, H, V] float64."""
    ways, found = list[list[int]](), []
    for row in range(turn.new):
        ways.append([*(ways[parents[row]] if row else ()), turn.cached + row])
        rows = tuple(part[[*range(turn.cached), *ways[row]]] for part in turn.tokens.rows)
        alone = Turn(dataclasses.replace(turn.tokens, rows=rows), turn.cached + len(ways[row]) - 1, 1)
        found.append(bench.expected(alone))
    return torch.cat(found)


TREES: Final = (trees_of_drafts,)
