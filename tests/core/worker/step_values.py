"""Steps written by hand, and the memory that they are laid out in."""

from __future__ import annotations

import numpy as np

from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import FULL, Phase
from enginery.contracts.step import Item, NewPages, StepInput

GEOMETRY = KVGeometry(pages={FULL: 9}, page_size=4, layers=(), dtype="float32", num_seats=4)


def step_of(*items: Item, number: int = 0, pages: dict[str, NewPages] | None = None, **changes: object) -> StepInput:
    ids = np.arange(100, 100 + sum(item.num_tokens for item in items), dtype=np.int32)
    fields = {"phase": Phase.PREFILL, "items": np.array(items, np.int32).tobytes(), "input_ids": ids.tobytes(), **changes}
    return StepInput(number=number, pages=pages or {}, **fields)


def new_pages(*rows: tuple[int, int, int, list[int]]) -> dict[str, NewPages]:
    """Seat, first column, drop before column, pages."""
    head = np.array([(seat, first, drop, len(pages)) for seat, first, drop, pages in rows], np.int32)
    return {FULL: NewPages(head.tobytes(), np.array([page for *_, pages in rows for page in pages], np.int32).tobytes())}


def item(seat: int, start: int, num_tokens: int, **changes: int) -> Item:
    usual = {"first_write": start, "num_logits": 1, "samples": 1}
    return Item(seat=seat, start=start, num_tokens=num_tokens, **usual | changes)
