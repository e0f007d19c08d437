"""The models' way to their attention backend: where a batch's plan becomes an argument, and where piecewise graphs are cut.

T tokens. Models call `attend` and `advance` without a plan; the socket, and nobody else, reads it from the batch and hands it on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from enginery.attention.relay import BackendRelay
from enginery.contracts.attention import LayerSpec
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.plan import ForwardPlan
from enginery.errors import StalePlan


class LayerCall(NamedTuple):
    """What a backend's per-layer method is given but for the batch and its plan.

    rows: tensors with a row for each of the batch's tokens, [T, ...]; so has `out`, which was allocated before the call.
    """

    method: Literal["attend", "advance"]
    rows: tuple[torch.Tensor, ...]
    layer: LayerSpec
    out: torch.Tensor


class LayerSocket:
    """Calls the relay's backend. relay: None while weights are recorded. on_capture: called instead while pieces are captured.

    on_written: called after each call that was not captured, whose `out` is written.
    """

    def __init__(self, relay: BackendRelay | None) -> None:
        self.relay = relay
        self.on_capture: Callable[[LayerCall], object] | None = None
        self.on_written: Callable[[LayerCall], None] | None = None

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        """Softmax attention of one layer, by the backend that planned the batch; `out` is written."""
        if self.on_capture is not None:
            self.on_capture(LayerCall("attend", (q, k, v), layer, out))
        else:
            relay, plan = self._ready(batch, out)
            if (told := relay.attend(q, k, v, layer, batch, plan, out)) is not None:
                relay.needs_none(told)
            if self.on_written is not None:
                self.on_written(LayerCall("attend", (q, k, v), layer, out))

    def advance(self, mixed: torch.Tensor, gates: torch.Tensor, layer: LayerSpec, batch: ForwardBatch, out: torch.Tensor) -> None:
        """One recurrent layer, by the backend that planned the batch; its states move on and `out` is written."""
        if self.on_capture is not None:
            self.on_capture(LayerCall("advance", (mixed, gates), layer, out))
        else:
            relay, plan = self._ready(batch, out)
            if (told := relay.advance(mixed, gates, layer, batch, plan, out)) is not None:
                relay.needs_none(told)
            if self.on_written is not None:
                self.on_written(LayerCall("advance", (mixed, gates), layer, out))

    def run(self, call: LayerCall, batch: ForwardBatch) -> None:
        """A recorded call, for the rows of this batch.

        Rows of `out` past its tokens are cleared: what was there may be no number, and experts are chosen for these rows too.
        """
        count, out = batch.num_tokens, call.out
        relay, plan = self._ready(batch, out)
        rows = [tensor[:count] for tensor in call.rows]
        method = relay.attend if call.method == "attend" else relay.advance
        relay.needs_none(method(*rows, call.layer, batch, plan, out[:count]))
        if count < len(out):
            out[count:].zero_()

    def _ready(self, batch: ForwardBatch, out: torch.Tensor) -> tuple[BackendRelay, ForwardPlan]:
        assert self.relay is not None, "a model ran while its weights were being recorded"
        if batch.plan is None:
            raise StalePlan(
                "the batch has no plan; plan after padding and before attend, and run the batch that `BackendRelay.plan` returned"
            )
        if batch.plan.key.capture:
            self.relay.check_captured(batch.plan, out)
        return self.relay, batch.plan
