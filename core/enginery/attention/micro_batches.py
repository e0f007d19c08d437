"""Two halves of a batch, planned before either runs, so that one can compute while the other communicates."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from enginery.attention.axes import cut_at
from enginery.attention.composite import Composite, Part
from enginery.contracts.batch import ForwardBatch, Phase


class MicroBatches(Composite):
    """Cuts between requests, where the halves differ least in their number of tokens; one request stays whole.

    So does a batch that is captured: captured plans of one backend share memory, and two halves would be in one graph.
    """

    kind = "micro"

    def cut(self, batch: ForwardBatch, *, capture: bool) -> Iterator[Part]:
        """Both parts go to the one child: it keeps no plan, so it can hold two."""
        count = batch.num_requests
        if count < 2 or capture:
            yield Part(child=0, rows=None, batch=batch)
            return
        if batch.phase is Phase.DECODE:  # lengths are equal; to look for the middle takes 18 us of the 90 of planning
            middle = count // 2
            first_tokens = middle * batch.decode_len
        else:
            ends = batch.q_lens_cpu.numpy().cumsum()  # [B]
            middle = 1 + int(np.abs(2 * ends[:-1] - ends[-1]).argmin())
            first_tokens = int(ends[middle - 1])
        for cut in cut_at(batch, middle, first_tokens, (batch.phase, batch.phase)):
            yield Part(child=0, rows=cut.rows, requests=cut.requests, batch=cut.batch)
