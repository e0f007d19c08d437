"""The memory of recurrent layers: states of a size that does not grow with a request's length.

    layer 0   conv    [page 0][page 1] ... [page n-1][scratch][zeros]      a page: the convolution's last inputs, [W - 1, C]
              matrix  [page 0][page 1] ... [page n-1][scratch][zeros]              [HV, value_dim, key_dim] float32

Which page a request's state is read from and written to, its batch's `StateView` says. Nobody clears a page: the first step of a
request reads the page of zeros, which nobody writes to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from enginery.contracts.attention import AttnLayerFacts, KVGeometry, LocalLayerId
from enginery.contracts.memory import State
from enginery.errors import Unsupported
from enginery.kv.pool import TORCH_DTYPES, cleared, local


def state_bytes(geometry: KVGeometry) -> int:
    """What one request's states take over all layers."""
    kept = [state for layer in geometry.layers if layer.recurrent is not None for state in layer.recurrent.states]
    return sum(math.prod(state.dims) * _dtype(state, geometry).itemsize for state in kept)


def _dtype(state: State, geometry: KVGeometry) -> torch.dtype:
    return TORCH_DTYPES[state.dtype or geometry.state_dtype or geometry.dtype]


class RecurrentStatePool:
    """A `StatePool` of `enginery.contracts.memory`: pages of each state of each recurrent layer, one of scratch, one of zeros."""

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        self._layers = [_states(geometry, layer, device) for layer in geometry.layers]

    def layer(self, layer: LocalLayerId) -> Mapping[str, torch.Tensor]:
        """[state pages + 2, *dims] of each state by its name."""
        states = self._layers[local(layer)]
        if states is None:
            raise Unsupported(
                f"layer {layer} of this stage is not recurrent and has no states; its keys and values are in the KV pool"
            )
        return states


def _states(geometry: KVGeometry, layer: AttnLayerFacts, device: torch.device) -> Mapping[str, torch.Tensor] | None:
    if layer.recurrent is None:
        return None
    pages = geometry.zero_page + 1
    return {state.name: cleared((pages, *state.dims), _dtype(state, geometry), device) for state in layer.recurrent.states}
