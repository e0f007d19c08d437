"""What a step runs with. What the model returns is looked at before anything reads it, as a wrong shape would end in a kernel:
shapes and the dtype of hidden states, in a microsecond a step, and nothing of the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from enginery.attention.relay import BackendRelay
from enginery.attention.socket import LayerSocket
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.model import Model
from enginery.contracts.ops import OpTable
from enginery.errors import PluginError
from enginery.kv.pool import PagedKVPool
from enginery.worker.token_feed import TokenFeed

if TYPE_CHECKING:
    from enginery.worker.drafts.draws import ForcedAcceptance
    from enginery.worker.ranks.collectives import JoinedHead


class ModelResults(NamedTuple):
    """What a model has to return. width: C, of hidden states. Both sizes are 0 of a stage before the last, whose results go to the
    next. source: the plugin as messages name it. dtype: of hidden states."""

    width: int
    vocab_size: int
    source: str
    dtype: torch.dtype

    def hidden(self, returned: object, batch: ForwardBatch) -> torch.Tensor:
        """What `forward` returned: [T, C], or [N, C] of the batch's `logits_rows`. Raises `PluginError` for anything else."""
        num_needed = batch.num_tokens if batch.logits_rows is None else len(batch.logits_rows)
        right = ((batch.num_tokens, self.width), (num_needed, self.width))
        if isinstance(returned, torch.Tensor) and returned.dtype is self.dtype and returned.shape in right:
            return returned
        raise self._refused("forward", returned, f"hidden states [{batch.num_tokens}, {self.width}] in {self.dtype}")

    def logits(self, returned: object, hidden: torch.Tensor) -> torch.Tensor:
        """What `logits` returned for `hidden` [N, C]: [N, V]. Raises `PluginError` for anything else."""
        if isinstance(returned, torch.Tensor) and returned.shape == (len(hidden), self.vocab_size):
            return returned
        raise self._refused("logits", returned, f"logits [{len(hidden)}, {self.vocab_size}]")

    def _refused(self, method: str, returned: object, wanted: str) -> PluginError:
        told = f"{list(returned.shape)} in {returned.dtype}" if isinstance(returned, torch.Tensor) else f"{returned!r:.60}"
        return PluginError(f"{self.source}: {method} of its model returned {told} instead of {wanted}")


class StepParts(NamedTuple):
    """What every step of a model runs with. pool: of keys and values. results: what the model has to return.

    joined: of several ranks, each with some of the logits' columns; None: the model gives them. socket: has the attention backends
    that run now, and others after a changeover. forced: for benchmarks, draws whether drafts are right.
    """

    model: Model
    joined: JoinedHead | None
    ops: OpTable
    socket: LayerSocket
    feed: TokenFeed
    pool: PagedKVPool
    results: ModelResults
    forced: ForcedAcceptance | None = None

    @property
    def relay(self) -> BackendRelay:
        """To the attention backends that run now."""
        assert self.socket.relay is not None, "steps run with backends"
        return self.socket.relay

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, V], on the first of several ranks; on the others zeros without memory."""
        head = self.model if self.joined is None else self.joined
        return self.results.logits(head.logits(hidden), hidden)
