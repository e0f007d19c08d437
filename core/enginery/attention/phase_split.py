"""One backend for prefills, another for decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from enginery.attention.axes import cut_by_phase
from enginery.attention.composite import Composite, Part
from enginery.attention.relay import BackendRelay
from enginery.contracts.batch import ForwardBatch, Phase
from enginery.plugin.hookspecs import hookimpl

_PREFILL: Final = 0
_DECODE: Final = 1


class PhaseSplit(Composite):
    """Gives each request to the backend of its phase; a mixed batch is cut in two. Verification goes with decoding."""

    kind = "split"

    def __init__(self, *, prefill: BackendRelay, decode: BackendRelay) -> None:
        super().__init__(prefill, decode)

    def serving_phase(self, phase: Phase) -> Sequence[int]:
        if phase is Phase.MIXED:
            return (_PREFILL, _DECODE)
        return (_PREFILL,) if phase is Phase.PREFILL else (_DECODE,)

    @hookimpl
    def init_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool | None:
        """Graphs are of decoding steps, which only one of the two sees."""
        done = self.children[_DECODE].ask("init_graph_state", max_batch_size=max_batch_size, max_num_tokens=max_num_tokens)
        return None if done is None else True

    def cut(self, batch: ForwardBatch, *, capture: bool) -> Iterator[Part]:
        """One part, or of a mixed batch the decoding requests at its front and the rest."""
        for cut in cut_by_phase(batch):
            yield Part(child=self.serving_phase(cut.batch.phase)[0], rows=cut.rows, requests=cut.requests, batch=cut.batch)
