"""Layers of different kinds of memory in one model: one backend for each kind, given that kind's view of each batch.

    batch     full   page table [ 4 | 9 | 2 | 7 | 1 ]    lengths 70      ->  full child       as it is
              window page table [ 3 | 8 ], starts 48     lengths 70      ->  window child     lengths 22, starts gone
              state  reads, writes                                       ->  state child      as it is

Causal and window masks count from the end, and positions are in the keys, so a backend that knows nothing of windows that begin
late serves them unchanged, and reads nothing out of reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from enginery.attention.axes import narrowed, renewed
from enginery.attention.composite import Composite, Part
from enginery.attention.relay import BackendRelay
from enginery.contracts.attention import LayerSpec
from enginery.contracts.batch import FULL, STATE, WINDOW, ForwardBatch, StateView, View
from enginery.kv.upload import to_device

LATENTS: Final = "latents"  # those of layers whose memory is of the kind `full`, beside others
Child = BackendRelay | None


class LayerKinds(Composite):
    """Has every batch planned by each child; a layer is served by that for its kind of memory, or else by that for `full`."""

    kind = "kinds"

    def __init__(self, *, full: Child = None, latents: Child = None, window: Child = None, state: Child = None) -> None:
        given = {FULL: full, LATENTS: latents, WINDOW: window, STATE: state}
        present = {kind: child for kind, child in given.items() if child is not None}
        super().__init__(*present.values())
        self._kinds = tuple(present)
        self._places: dict[str, tuple[int, ...]] = {kind: (place,) for place, kind in enumerate(self._kinds)}
        for kind in (LATENTS, WINDOW):
            self._places.setdefault(kind, self._places.get(FULL, ()))
        self._nested = tuple(_holds_kinds(child) for child in self.children)

    def serving_layer(self, layer: LayerSpec) -> Sequence[int]:
        return self._places.get(LATENTS if layer.facts.latent is not None else layer.kind, ())

    def cut(self, batch: ForwardBatch, *, capture: bool) -> Iterator[Part]:
        """The whole batch, once for each child."""
        for place, kind in enumerate(self._kinds):
            own = FULL if kind == LATENTS else kind
            yield Part(child=place, rows=None, batch=batch if self._nested[place] else of_kind(batch, own))


def of_kind(batch: ForwardBatch, kind: str) -> ForwardBatch:
    """The batch with the view of one kind alone, as a leaf is given it; another batch, unplanned. Lengths count what is held."""
    view = batch.views[kind]
    if isinstance(view, StateView) or view.starts_cpu is None:
        return narrowed(batch, {kind: view})
    kv_lens = batch.kv_lens
    if kv_lens is not None:
        kv_lens = kv_lens - to_device(view.starts_cpu, kv_lens.device)
    shorter = narrowed(batch, {kind: View(slots=view.slots, page_table_cpu=view.page_table_cpu)})
    return renewed(shorter, kv_lens_cpu=batch.kv_lens_cpu - view.starts_cpu, kv_lens=kv_lens)


def _holds_kinds(relay: BackendRelay) -> bool:
    backend = relay.backend
    return isinstance(backend, LayerKinds) or (isinstance(backend, Composite) and any(map(_holds_kinds, backend.children)))
