"""The memory of recurrent layers: one state per request and layer, of a size that does not grow with its length.

    layer 0   [page 0][page 1] ... [page n-1][scratch][zeros]      a page: one state, [HV, value_dim, key_dim] float32

Which page a request's state is read from and written to, its batch's `StateView` says. Nobody clears a page: the first step of a
request reads the page of zeros, which nobody writes to.
"""

from __future__ import annotations

import math

import torch

from enginery.contracts.attention import AttnLayerFacts, KVGeometry, LocalLayerId
from enginery.contracts.memory import RecurrentFacts
from enginery.errors import Unsupported
from enginery.kv.pool import cleared, local


def state_bytes(geometry: KVGeometry) -> int:
    """What one request's states take over all layers."""
    shapes = [_state_shape(layer.recurrent) for layer in geometry.layers if layer.recurrent is not None]
    return sum(4 * math.prod(shape) for shape in shapes)


def _state_shape(facts: RecurrentFacts) -> tuple[int, int, int]:
    return facts.value_heads, facts.value_dim, facts.key_dim


class RecurrentStatePool:
    """A state a page for each recurrent layer, one of scratch and one of zeros. A `StatePool` of `enginery.contracts.memory`."""

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        self._layers = [_states(geometry, layer, device) for layer in geometry.layers]

    def layer(self, layer: LocalLayerId) -> torch.Tensor:
        """[state pages + 2, HV, value_dim, key_dim] float32."""
        states = self._layers[local(layer)]
        if states is None:
            raise Unsupported(
                f"layer {layer} of this stage is not recurrent and has no states; its keys and values are in the KV pool"
            )
        return states


def _states(geometry: KVGeometry, layer: AttnLayerFacts, device: torch.device) -> torch.Tensor | None:
    if layer.recurrent is None:
        return None
    return cleared((geometry.zero_page + 1, *_state_shape(layer.recurrent)), torch.float32, device)
