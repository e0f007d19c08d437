"""Recorded steps of several lanes as those of one, which a single process runs again.

    pages of lane 0 | pages of lane 1 | ..     seats of all lanes differ already; of their items `together` makes one step

L lanes, P pages of a kind in each, B items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from enginery.contracts.batch import STATE, MemoryKind
from enginery.contracts.step import INT, NewPages, StepInput
from enginery.errors import ConfigError

_READ: Final = 0  # of the states of an item
_NUM_PAGES: Final = 3  # the first of them: read, written, of a checkpoint


def num_pages(steps: Sequence[StepInput]) -> dict[MemoryKind, int]:
    """As many of each kind as to have the largest that a step names. The first request reads the state of zeros, which is behind
    all pages and that of scratch."""
    kinds = dict.fromkeys(kind for step in steps for kind in step.pages)
    named = {kind: [np.frombuffer(step.pages[kind].pages, INT) for step in steps if kind in step.pages] for kind in kinds}
    found = {kind: 1 + _largest(pages) for kind, pages in named.items()}
    if any(step.states for step in steps):
        found[STATE] = _largest([_states(step)[:, _READ] for step in steps]) - 1
    return found


def as_one_lane(steps: Sequence[StepInput]) -> list[StepInput]:
    """Steps of one lane as they are. Raises `ConfigError` for what is not recorded of lanes."""
    pages = num_pages([own for step in steps for own in step.lanes])
    return [_as_one(step, pages) if step.lanes else step for step in steps]


def _as_one(step: StepInput, pages: Mapping[MemoryKind, int]) -> StepInput:
    if any(own.inputs or own.parents for own in step.lanes):
        raise ConfigError(f"step {step.number} has inputs of a model's own, or branches, and of lanes these are not run again")
    order = np.argsort(np.concatenate(step.lane_places)).tolist()
    ids = list[np.ndarray]()  # the tokens of each item that the host knows
    for own in step.lanes:
        items = own.columns()
        ids += np.split(np.frombuffer(own.input_ids, INT), np.cumsum(items.num_tokens - items.pending))[:-1]
    return msgspec.structs.replace(
        step,
        input_ids=b"".join([ids[place].tobytes() for place in order]),
        pages=_moved_pages(step, pages),
        states=_moved_states(step, pages[STATE])[order].tobytes() if STATE in pages else b"",
        released=b"".join([own.released for own in step.lanes]),
        lanes=(),
    )


def _moved_pages(step: StepInput, pages: Mapping[MemoryKind, int]) -> dict[MemoryKind, NewPages]:
    found = {}
    for kind, count in pages.items():
        if news := [(lane * count, own.pages[kind]) for lane, own in enumerate(step.lanes) if kind in own.pages]:
            moved = [np.frombuffer(each.pages, INT) + INT.type(first) for first, each in news]
            found[kind] = NewPages(b"".join(each.rows for _, each in news), np.concatenate(moved).tobytes())
    return found


def _moved_states(step: StepInput, count: int) -> np.ndarray:
    """[B, 4]: the page of scratch and that of zeros, which are behind all others, stay the lanes' last."""
    found = []
    for lane, own in enumerate(step.lanes):
        states = _states(own).copy()
        pages = states[:, :_NUM_PAGES]
        pages += np.where(pages < 0, 0, np.where(pages < count, lane, len(step.lanes) - 1) * count).astype(INT)
        found.append(states)
    return np.concatenate(found)


def _states(step: StepInput) -> np.ndarray:
    return np.frombuffer(step.states, INT).reshape(-1, 4)


def _largest(values: Sequence[np.ndarray]) -> int:
    return int(np.concatenate(values).max(initial=-1))
