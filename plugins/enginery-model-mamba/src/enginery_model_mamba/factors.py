"""Factors that families have behind their products, and before them: they are bound with the weights, so no step multiplies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from enginery.api import Linear, LinearShape, WeightSource
from enginery_model_mamba.blocks import Renamed


class Multiplied(Renamed):
    """A source whose products come multiplied. Implements `enginery.api.WeightSource`."""

    def __init__(self, weights: WeightSource, factors: Mapping[str, float], *, inputs: Mapping[str, float] | None = None) -> None:
        """factors: of what modules give, wherever they are, by the last part of their names; the others' are 1. inputs: of what
        is given to products, by the same of their first module."""
        super().__init__(weights, {})
        self._factors, self._inputs = factors, inputs or {}

    def scope(self, prefix: str) -> WeightSource:
        """Multiplied too."""
        return Multiplied(self._weights.scope(prefix), self._factors, inputs=self._inputs)

    def over_lanes(self) -> WeightSource:
        """See `WeightSource`."""
        return Multiplied(self._weights.over_lanes(), self._factors, inputs=self._inputs)

    def linear(self, shape: LinearShape) -> Linear:
        """See `WeightSource`."""
        factors = tuple(part.factor * self._factors.get(part.name, 1.0) for part in shape.parts)
        before = shape.input_factor * self._inputs.get(shape.names[0], 1.0)
        return super().linear(dataclasses.replace(shape, factor=factors, input_factor=before))
