"""Softmax attention in some layers, recurrence in the others: one backend for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from enginery.attention.axes import unplanned
from enginery.attention.composite import Composite, Part
from enginery.attention.relay import BackendRelay
from enginery.contracts.attention import LayerSpec
from enginery.contracts.batch import ForwardBatch

_SOFTMAX: Final = 0
_RECURRENT: Final = 1


class LayerHybrid(Composite):
    """Has every batch planned by both; a layer is attended by the one for its kind."""

    kind = "hybrid"

    def __init__(self, *, softmax: BackendRelay, recurrent: BackendRelay) -> None:
        super().__init__(softmax, recurrent)

    def serving_layer(self, layer: LayerSpec) -> Sequence[int]:
        """By what the layer keeps: pages or a state."""
        return (_SOFTMAX,) if layer.facts.recurrent is None else (_RECURRENT,)

    def cut(self, batch: ForwardBatch) -> Iterator[Part]:
        """The whole batch, twice."""
        for child in (_SOFTMAX, _RECURRENT):
            yield Part(child=child, rows=None, batch=unplanned(batch))
