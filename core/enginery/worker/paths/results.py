"""What a step runs with. What the model returns is looked at before anything reads it: a wrong shape would end in a kernel.

Only shapes are compared, after the call: a microsecond a step, nothing of the device, and no frame between a step and its kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from enginery.attention.relay import BackendRelay
from enginery.attention.socket import LayerSocket
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.model import Model
from enginery.contracts.ops import OpTable
from enginery.errors import PluginError
from enginery.kv.pool import PagedKVPool
from enginery.worker.token_feed import TokenFeed


class ModelResults(NamedTuple):
    """What a model has to return. width: C, of hidden states. Both sizes are 0 of a stage before the last, whose results go to the
    next. source: the plugin as messages name it."""

    width: int
    vocab_size: int
    source: str

    def hidden(self, returned: object, batch: ForwardBatch) -> torch.Tensor:
        """What `forward` returned: [T, C], or [N, C] of the batch's `logits_rows`. Raises `PluginError` for anything else."""
        if isinstance(returned, torch.Tensor):
            if returned.shape == (batch.num_tokens, self.width):
                return returned
            if batch.logits_rows is not None and returned.shape == (len(batch.logits_rows), self.width):
                return returned
        wanted = f"hidden states [{batch.num_tokens}, {self.width}]"
        raise PluginError(f"{self.source}: forward of its model returned {_told(returned)} instead of {wanted}")

    def logits(self, returned: object, hidden: torch.Tensor) -> torch.Tensor:
        """What `logits` returned for `hidden` [N, C]: [N, V]. Raises `PluginError` for anything else."""
        if isinstance(returned, torch.Tensor) and returned.shape == (len(hidden), self.vocab_size):
            return returned
        wanted = f"logits [{len(hidden)}, {self.vocab_size}]"
        raise PluginError(f"{self.source}: logits of its model returned {_told(returned)} instead of {wanted}")


class StepParts(NamedTuple):
    """What every step of a model runs with. pool: of keys and values. results: what the model has to return."""

    model: Model
    relay: BackendRelay
    ops: OpTable
    socket: LayerSocket
    feed: TokenFeed
    pool: PagedKVPool
    results: ModelResults


def _told(returned: object) -> str:
    return str(list(returned.shape)) if isinstance(returned, torch.Tensor) else f"{returned!r:.60}"
