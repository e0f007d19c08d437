"""Sees the steps of an engine. Imports no transformers, which takes seconds: processes that tests start use it too."""

from __future__ import annotations

from collections.abc import Callable

import torch

from enginery.attention.relay import BackendRelay
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.plan import ForwardPlan
from enginery.engine.build import BuiltParts


def watch_steps(parts: BuiltParts, note: Callable[[ForwardBatch], None]) -> None:
    """Have `note` called with the planned batch of each step that attends, whether its model runs or its graphs do.

    Also after the engine has changed over to other backends, which are others behind the same socket.
    """
    ready, last = parts.step.socket._ready, list[ForwardBatch]()

    def noting(batch: ForwardBatch, out: torch.Tensor) -> tuple[BackendRelay, ForwardPlan]:
        found = ready(batch, out)
        if not last or last[-1] is not batch:
            last[:] = [batch]
            note(batch)
        return found

    parts.step.socket._ready = noting
