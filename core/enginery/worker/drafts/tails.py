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
from enginery.worker.page_tables import PageTables


class _Kept(NamedTuple):
    """Of one request in a step, until its next one begins.

    ends: the positions behind its last told row that there may be, the first and the last; which, the device alone may know. spare:
    rows that there are beside the last one if that is the first of them. wanted: at the most. ids: [n] int64, features: [n, F * C],
    the last rows up to the last told one, in front of them others where there are fewer; device.
    """

    ends: tuple[int, int]
    spare: int
    wanted: int
    ids: torch.Tensor
    features: torch.Tensor

    def before(self, start: int) -> _Tail:
        """When it is known where the request goes on."""
        first, last = self.ends
        if not first <= start <= last:
            return _NOTHING
        count = min(self.wanted, 1 + self.spare + start - first)
        return _Tail(start, self.ids[len(self.ids) - count :], self.features[len(self.ids) - count :])


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
        self._by_seat: dict[int, _Kept] = {}

    def before(self, step: StepInput, batch: ForwardBatch, features: torch.Tensor, tables: PageTables) -> FollowedRows:
        """The step's rows with those of each request that are to be run over again in front."""
        items = step.columns()
        self._forget_begun(step)
        found = [self._by_seat.pop(seat, None) for seat in items.seat.tolist()]
        tails = [_NOTHING if one is None else one.before(start) for one, start in zip(found, items.start.tolist(), strict=True)]
        if any(len(tail.ids) for tail in tails):
            return _joined(step, tails, batch, features, tables)
        return FollowedRows(renewed(batch, views={FULL: batch.views[FULL]}, logits_rows=None), features, None)

    def keep(self, step: StepInput, rows: FollowedRows, told: torch.Tensor) -> None:
        """For the next step of each request. told: [S], of items that sample, the last told one of the rows that were followed,
        on the device, as all that is kept. Nothing waits for it."""
        items = step.columns()
        wanted = self._num_modules - (items.samples != 0)  # [B]
        which = np.flatnonzero(wanted)
        if not len(which):
            return
        lens, ends = step.rows.astype(np.int64), rows.batch.q_lens_cpu.numpy().cumsum(dtype=np.int64)
        begins, device = ends - rows.batch.q_lens_cpu.numpy(), told.device
        at = to_device(torch.from_numpy(np.stack((ends - 1, begins))), device)  # [2, B]
        last = at[0].index_copy(0, to_device(torch.from_numpy(step.sampling), device), told) if len(told) else at[0]
        back = torch.arange(1 - int(wanted.max()), 1, device=device)
        places = torch.maximum(last[:, None] + back, at[1][:, None])  # [B, n]
        places = places.index_select(0, to_device(torch.from_numpy(which), device))
        ids, features = (each.index_select(0, places.flatten()) for each in (rows.batch.input_ids, rows.features))
        ids, features = ids.view(places.shape), features.view(*places.shape, -1)
        first_ends = items.start + items.num_tokens - items.num_drafts  # [B]
        spares = (ends - begins - lens) + first_ends - items.start - 1
        for place, index in enumerate(which.tolist()):
            first = int(first_ends[index])
            self._by_seat[int(items.seat[index])] = _Kept(
                (first, first + int(items.num_drafts[index])), int(spares[index]), int(wanted[index]), ids[place], features[place]
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
    view, rows, device = batch.views[FULL], step.rows, features.device
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
