"""The last rows of each request that a draft model runs over again, because what follows them was not known the first time.

Row p of module k is given the token at p + 1 + k. Behind a prompt's chunk none of these tokens is known, behind a sampled token
those of all modules but the first are guesses. So the rows are kept until the request's next step, which begins with them:

    step n          rows  5 6 7      module 0 is given t6 t7 t8, module 1 t7 t8 and a guess at t9
    step n + 1    7 | 8 9            module 0 is given t8 | t9 t10, module 1 t9 | t10 and a guess

T rows of a step, F * C values of the target's hidden states of a row, B items.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from enginery.attention.axes import renewed
from enginery.contracts.batch import FULL, ForwardBatch, Phase, View
from enginery.contracts.step import INT, StepInput
from enginery.kv.upload import to_device
from enginery.worker.layout import begins_of, rows_of_items
from enginery.worker.page_tables import PageTables


class _Tail(NamedTuple):
    """end: the position behind its last row. ids: [n] int64, the rows' own tokens. features: [n, F * C]."""

    end: int
    ids: torch.Tensor
    features: torch.Tensor


_NOTHING = _Tail(-1, torch.empty(0, dtype=torch.int64), torch.empty(0))


class FollowedRows(NamedTuple):
    """What a draft model runs over: batch, with each row's own token, and features, [T', F * C].

    place: [T] int64, host, of the step's rows; None: where they are in the step.
    """

    batch: ForwardBatch
    features: torch.Tensor
    place: np.ndarray | None


class Tails:
    """Of all requests, by seat. num_modules: of the draft model."""

    def __init__(self, num_modules: int) -> None:
        self._num_modules = num_modules
        self._by_seat: dict[int, _Tail] = {}

    def before(self, step: StepInput, batch: ForwardBatch, features: torch.Tensor, tables: PageTables) -> FollowedRows:
        """The step's rows with those of each request that are to be run over again in front."""
        items = step.columns()
        self._forget_begun(step)
        found = [self._by_seat.pop(seat, _NOTHING) for seat in items.seat.tolist()]
        tails = [tail if tail.end == start else _NOTHING for tail, start in zip(found, items.start.tolist(), strict=True)]
        if any(len(tail.ids) for tail in tails):
            return _joined(step, tails, batch, features, tables)
        own = renewed(batch, views={FULL: batch.views[FULL]}, logits_rows=None)
        return FollowedRows(own, features, None)

    def keep(self, step: StepInput, rows: FollowedRows, told: np.ndarray | None = None) -> None:
        """For the next step of each request. told: [S], of items that sample, the step's row before the last told token.

        None: the host does not know, nor does it have to where there is one module.
        """
        items = step.columns()
        wanted = self._num_modules - (items.samples != 0)  # [B]
        if not wanted.any():
            return
        lens = rows_of_items(step)
        last = np.cumsum(lens).astype(np.int64) - 1  # [B]
        if told is not None:
            last[step.sampling] = told
        ends = (items.start + lens - (np.cumsum(lens) - 1 - last)).tolist()
        lasts = (last if rows.place is None else rows.place[last]).tolist()
        begins = begins_of(rows.batch.q_lens_cpu.numpy())
        for index in np.flatnonzero(wanted).tolist():
            stop = lasts[index] + 1
            part = slice(max(stop - int(wanted[index]), int(begins[index])), stop)
            self._by_seat[int(items.seat[index])] = _Tail(
                ends[index], rows.batch.input_ids[part].clone(), rows.features[part].clone()
            )

    def forget(self, step: StepInput) -> None:
        """Of the requests of a step that is not followed, which are further now."""
        if self._by_seat:
            self._forget_begun(step)
            for seat in step.columns().seat.tolist():
                self._by_seat.pop(seat, None)

    def _forget_begun(self, step: StepInput) -> None:
        """Another request sits there now."""
        if (new := step.pages.get(FULL)) is not None:
            for seat, first, *_ in np.frombuffer(new.rows, INT).reshape(-1, 4).tolist():
                if first == 0:
                    self._by_seat.pop(seat, None)


def _joined(
    step: StepInput, tails: Sequence[_Tail], batch: ForwardBatch, features: torch.Tensor, tables: PageTables
) -> FollowedRows:
    """Each request's tail in front of its rows."""
    view, rows, device = batch.views[FULL], rows_of_items(step), features.device
    assert isinstance(view, View), "full pages have slots"
    lens = np.array([len(tail.ids) for tail in tails])
    item = np.arange(len(rows)).repeat(lens)  # of each row of a tail
    there = [tail for tail in tails if len(tail.ids)]
    places = np.concatenate([np.arange(tail.end - len(tail.ids), tail.end) for tail in there])
    columns, offsets = np.divmod(places, tables.page_size)
    pages = tables.full.of(step.columns().seat, int(columns.max()) + 1)[item, columns].astype(np.int64)
    order = np.concatenate((item, np.arange(len(rows)).repeat(rows))).argsort(kind="stable")
    numbers = to_device(torch.from_numpy(np.concatenate((places, pages * tables.page_size + offsets, order))), device)
    front_places, front_slots, in_order = torch.split(numbers, [len(item), len(item), len(order)])
    ids, positions, slots, joined = (
        torch.cat((front, behind)).index_select(0, in_order)
        for front, behind in (
            (torch.cat([tail.ids for tail in there]), batch.input_ids),
            (front_places, batch.positions),
            (front_slots, view.slots),
            (torch.cat([tail.features for tail in there]), features),
        )
    )
    longer = ForwardBatch(
        phase=Phase.PREFILL,
        input_ids=ids,
        positions=positions,
        q_lens_cpu=torch.from_numpy((rows + lens).astype(np.int32)),
        kv_lens_cpu=batch.kv_lens_cpu,
        num_logits_cpu=batch.num_logits_cpu,
        seats_cpu=batch.seats_cpu,
        views={FULL: View(slots=slots, page_table_cpu=view.page_table_cpu)},
    )
    return FollowedRows(longer, joined, order.argsort()[len(item) :])
