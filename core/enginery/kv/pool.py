"""The paged KV memory: per layer, pages of keys and pages of values.

    layer 0   k [page 0][page 1] ... [page n-1][scratch]      a page: [page_size, K, D]
              v [page 0][page 1] ... [page n-1][scratch]      slot s = page s // page_size, offset s % page_size

The last page is scratch and belongs to no request: rows that only pad a batch write there. An MLA layer has one row of latents per
token in place of keys and values; a recurrent layer has none of it (`states.py`).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from enginery.contracts.attention import AttnLayerFacts, KVGeometry, LocalLayerId
from enginery.contracts.batch import FULL, MemoryKind
from enginery.contracts.memory import LayerKV
from enginery.errors import OutOfMemory
from enginery.nn.reference_ops import store_rows

TORCH_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def page_bytes(geometry: KVGeometry, kind: MemoryKind = FULL) -> int:
    """What one page of a kind takes over all layers."""
    itemsize = TORCH_DTYPES[geometry.dtype].itemsize
    layers = [layer for layer in geometry.layers if geometry.kind_of(layer) == kind]
    return sum(geometry.page_size * layer.num_kv_heads * sum(_widths(layer)) * itemsize for layer in layers)


def _widths(layer: AttnLayerFacts) -> tuple[int, ...]:
    """What each of the layer's tensors has of a head: a key and a value, a latent alone; none of a recurrent layer."""
    if layer.recurrent is not None:
        return ()
    return (layer.head_dim,) if layer.latent is not None else (layer.head_dim, layer.value_dim)


class PagedKVPool:
    """Keys and values, or latents, of softmax-attention layers. Implements `enginery.contracts.memory.KVPool`.

    Cleared at the start, because a masked-out slot is still multiplied, by zero, and must not hold a NaN.
    """

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        self.geometry = geometry
        self._layers = [_pages(geometry, layer, device) for layer in geometry.layers]

    def layer(self, layer: LocalLayerId) -> LayerKV:
        """[num_pages + 1, page_size, K, D], and as many values; of an MLA layer the second is a part of the first."""
        stored = self._layers[local(layer)]
        if len(stored) == 2:
            return LayerKV(*stored)
        (latents,) = stored
        latent = self.geometry.layers[layer].latent
        assert latent is not None
        return LayerKV(latents, latents[..., : latent.rank])

    def by_slot(self, layer: LocalLayerId) -> LayerKV:
        """[slots, K, D], twice."""
        k, v = self.layer(layer)
        return LayerKV(k.flatten(0, 1), v.flatten(0, 1))

    def write(self, layer: LocalLayerId, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """k, v: [T, K, D]; slots: [T] int64."""
        for stored, rows in zip(self._layers[local(layer)], (k, v), strict=False):
            store_rows(stored.flatten(0, 1), slots, rows)

    def move(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy what is kept in the slots `src` to the slots `dst`, [N] int64, device, in all full pages; all is read, then written.

        Device work only. A slot that is written twice has one of the two.
        """
        for layer, stored in zip(self.geometry.layers, self._layers, strict=True):
            for pages in stored if self.geometry.kind_of(layer) == FULL else ():
                rows = pages.flatten(0, 1)
                rows = rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows  # of float8 torch copies no rows
                rows.index_copy_(0, dst, rows.index_select(0, src))


def _pages(geometry: KVGeometry, layer: AttnLayerFacts, device: torch.device) -> tuple[torch.Tensor, ...]:
    shape = (geometry.scratch_page(layer.kind) + 1, geometry.page_size, layer.num_kv_heads)
    return tuple(cleared((*shape, width), TORCH_DTYPES[geometry.dtype], device) for width in _widths(layer))


def local(layer: LocalLayerId) -> LocalLayerId:
    """The same, if it is one. Raises `TypeError` for a `GlobalLayerId` and for other numbers: they count other things."""
    if type(layer) is not LocalLayerId:
        raise TypeError(f"pools are indexed by LocalLayerId (LayerSpec.local_id), not by {type(layer).__name__} {layer}")
    return layer


def cleared(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU by numpy, whose zeros cost no time and no memory until they are written to, from the start of a line.

    Raises `OutOfMemory` where the process may not have so much, as under `ulimit -v`.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        whole = torch.from_numpy(np.zeros(size + 64, dtype=np.uint8))
    except MemoryError as error:
        raise OutOfMemory(
            f"the system refuses this process {size:,} bytes of KV memory, a part of one layer's; lower --kv-memory-gib, "
            "--num-pages or --max-batch-requests, or raise its limit (ulimit -v)"
        ) from error
    return whole[-whole.data_ptr() % 64 :][:size].view(dtype).view(shape)
