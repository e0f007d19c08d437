"""Checks of plans and outputs that cost time, for the conformance kit and for `--check-attention`.

Torch keeps no version of tensors that inference makes, so a host tensor that is written after planning is noticed by a digest.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final

import torch

from enginery.contracts.batch import READ, STATED, VIEWS, ForwardBatch
from enginery.contracts.plan import ForwardPlan
from enginery.errors import PluginError, StalePlan


class UnwrittenOutput(PluginError):
    """A backend returned, and rows of `out` are as they were."""


# A NaN that no computation gives, by the bytes of its dtype: where it is still there, nothing was written.
_POISON: Final = {
    1: (torch.uint8, 0x7F),
    2: (torch.int16, 0x7FED),
    4: (torch.int32, 0x7FC0DEAD),
    8: (torch.int64, 0x7FF8DEADC0DEDEAD),
}


def poison(out: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with NaN that `is_poison` knows again, and return it."""
    bits, value = _POISON[out.dtype.itemsize]
    out.view(bits).fill_(value)
    return out


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Where a tensor that was poisoned was not written to: bool, of the same shape."""
    bits, value = _POISON[tensor.dtype.itemsize]
    return tensor.view(bits) == value


class Watch:
    """Of one relay. Its checks read from the device, so they are left out while a graph is captured."""

    def __init__(self) -> None:
        self._digests: weakref.WeakKeyDictionary[ForwardPlan, int] = weakref.WeakKeyDictionary()

    def planned(self, batch: ForwardBatch, plan: ForwardPlan) -> None:
        self._digests[plan] = digest(batch)

    def before(self, batch: ForwardBatch, plan: ForwardPlan, out: torch.Tensor) -> None:
        """Poison `out`. Raises `StalePlan` if a host tensor was written after planning."""
        if is_capturing(out):
            return
        if self._digests.get(plan, digest(batch)) != digest(batch):
            raise StalePlan(
                f"a host tensor of the batch was written after it was planned for {plan.key}; make another batch instead"
            )
        poison(out)

    def after(self, inputs: Sequence[torch.Tensor], batch: ForwardBatch, out: torch.Tensor, backend_id: str) -> None:
        """Raises `PluginError` if a row of a request was not written. inputs: if they are no numbers, nor need `out` be."""
        if is_capturing(out):
            return
        count = int(batch.q_lens_cpu.sum())
        unwritten = is_poison(out[:count]).flatten(1).all(1)
        if bool(unwritten.any()) and all(bool(tensor[:count].isfinite().all()) for tensor in inputs):
            raise UnwrittenOutput(f"{backend_id} left {int(unwritten.sum())} of {count} rows of `out` unwritten")


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether what is launched for the tensor goes into a graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def digest(batch: ForwardBatch) -> int:
    """Of all that a batch has in host memory."""
    owners = ((batch, STATED), *((view, VIEWS[type(view)]) for view in batch.views.values()))
    values = (READ[name](owner) for owner, stated in owners for name in stated if name.endswith("_cpu"))
    return hash(tuple(tensor.numpy().tobytes() for tensor in values if tensor is not None))
