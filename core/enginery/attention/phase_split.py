"""One backend for prefills, another for decoding, and at times a third for decoding one request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from enginery.attention.axes import cut_by_phase
from enginery.attention.composite import Composite, Part
from enginery.attention.relay import MIXED_GRAPHS, BackendRelay
from enginery.contracts.batch import ForwardBatch, Phase
from enginery.plugin.hookspecs import hookimpl

_DECODE: Final = 1  # the first child that decodes


class PhaseSplit(Composite):
    """Gives each request to the backend of its phase; a mixed batch is cut in two. Verification goes with decoding. single: has
    what decodes in a step if that is one request, as padded; so a graph is of the same child as its replays."""

    kind = "split"

    def __init__(self, *, prefill: BackendRelay, decode: BackendRelay, single: BackendRelay | None = None) -> None:
        super().__init__(prefill, decode, *([] if single is None else [single]))

    def serving_phase(self, phase: Phase) -> Sequence[int]:
        every = range(len(self.children))
        return every if phase is Phase.MIXED else every[:_DECODE] if phase is Phase.PREFILL else every[_DECODE:]

    @hookimpl
    def init_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool | None:
        """Graphs are of decoding steps, which the child for prefills does not see."""
        sizes = zip(self.children[_DECODE:], (max_batch_size, 1), strict=False)
        done = [child.ask("init_graph_state", max_batch_size=most, max_num_tokens=max_num_tokens) for child, most in sizes]
        return None if None in done else True

    @hookimpl
    def init_mixed_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool | None:
        """What is captured of these is all of the child that decodes."""
        asked = {"max_batch_size": max_batch_size, "max_num_tokens": max_num_tokens}
        return self.children[_DECODE].ask(MIXED_GRAPHS, **asked)  # type: ignore[no-any-return]

    def cut(self, batch: ForwardBatch, *, capture: bool) -> Iterator[Part]:
        """One part, or of a mixed batch that is not captured the decoding requests at its front and the rest."""
        for cut in cut_by_phase(batch, capture=capture):
            serving = self.serving_phase(cut.batch.phase)
            child = _DECODE if cut.batch.phase is Phase.MIXED else serving[-1 if cut.batch.num_requests == 1 else 0]
            yield Part(child=child, rows=cut.rows, requests=cut.requests, batch=cut.batch)
