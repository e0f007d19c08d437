"""The paged KV memory: per layer, pages of keys and pages of values.

    layer 0   k [page 0][page 1] ... [page n-1][scratch]      a page: [page_size, K, D]
              v [page 0][page 1] ... [page n-1][scratch]      slot s = page s // page_size, offset s % page_size

The scratch page, number `num_pages`, belongs to no request: rows that only pad a batch write there.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from enginery.contracts.attention import KVGeometry, LocalLayerId
from enginery.contracts.memory import LayerKV


def page_bytes(geometry: KVGeometry) -> int:
    """What one page takes over all layers."""
    itemsize = getattr(torch, geometry.dtype).itemsize
    return sum(2 * geometry.page_size * layer.num_kv_heads * layer.head_dim * itemsize for layer in geometry.layers)


class PagedKVPool:
    """Keys and values of full-attention layers. Implements `enginery.contracts.memory.KVPool`.

    Cleared at the start, because a masked-out slot is still multiplied, by zero, and must not hold a NaN.
    """

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        self.geometry = geometry
        dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._layers: list[LayerKV] = []
        self._by_slot: list[LayerKV] = []
        for layer in geometry.layers:
            shape = (geometry.num_pages + 1, geometry.page_size, layer.num_kv_heads, layer.head_dim)
            pages = LayerKV(*(_cleared(shape, dtype, device) for _ in range(2)))
            self._layers.append(pages)
            self._by_slot.append(LayerKV(*(part.view(-1, *shape[2:]) for part in pages)))

    def layer(self, layer: LocalLayerId) -> LayerKV:
        """[num_pages + 1, page_size, K, D], twice."""
        return self._layers[layer]

    def write(self, layer: LocalLayerId, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """k, v: [T, K, D]; slots: [T] int64."""
        keys, values = self._by_slot[layer]
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)


def _cleared(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU by numpy, whose zeros cost no time and no memory until they are written to."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
