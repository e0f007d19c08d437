"""The memory that the layers of a model need, as a geometry: what a page of each kind holds, and how many there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from enginery.contracts.attention import KVGeometry
from enginery.contracts.batch import FULL, STATE, WINDOW, MemoryKind
from enginery.worker.choice import Choice
from enginery.worker.memory_plan import MemoryPlan
from enginery.worker.weights.shares import stage_of


def no_pages(choice: Choice) -> KVGeometry:
    """The shape of a page, before it is known how many there are."""
    settings = choice.settings
    layers = stage_of(choice.facts, choice.parallel).memory
    pages = {} if largest_window(choice) is None else {WINDOW: 0}
    size, own = settings.page_size, settings.dtype  # the inputs of a convolution are no keys
    return KVGeometry(pages=pages, page_size=size, layers=layers, dtype=settings.kv_dtype, state_dtype=own)


def with_pages(geometry: KVGeometry, memory: MemoryPlan, *, max_requests: int, asked: Mapping[MemoryKind, int]) -> KVGeometry:
    """The same, and how many there are of each kind: as many as were asked for, or as planned."""
    pages = {FULL: memory.num_pages, STATE: memory.state_pages or max_requests, WINDOW: memory.window_pages, **asked}
    return dataclasses.replace(geometry, pages={kind: count for kind, count in pages.items() if count}, num_seats=max_requests)


def largest_window(choice: Choice) -> int | None:
    """The largest window of the model's layers; None if no window ever drops a token: then it needs no memory of its own."""
    windows = [layer.sliding_window for layer in choice.facts.layers if layer.sliding_window is not None]
    return max(windows) if windows and max(windows) < choice.settings.max_model_len else None
