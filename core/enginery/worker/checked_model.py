"""What a plugin's model returns is looked at before anything reads it: a wrong shape would end in a kernel, or in wrong tokens.

T tokens, N rows that need logits, C channels, V vocabulary.
"""

from __future__ import annotations

import torch

from enginery.contracts.batch import ForwardBatch
from enginery.contracts.model import Model, ModelFacts
from enginery.contracts.parallel import StageTensors
from enginery.errors import PluginError


class CheckedModel:
    """Implements `enginery.contracts.model.Model` by the model of a plugin, of one rank and stage.

    source: the plugin as messages name it. Both methods raise `PluginError` for a result that is not what the protocol says. Only
    shapes are compared: a microsecond a step, and nothing of the device.
    """

    def __init__(self, model: Model, facts: ModelFacts, *, source: str) -> None:
        self.model = model
        self._width, self._vocab_size = facts.hidden_size, facts.vocab_size
        self._source = source

    def forward(self, batch: ForwardBatch, arrived: StageTensors | None = None) -> torch.Tensor:
        """[T, C], or [N, C] of the batch's `logits_rows` alone."""
        hidden = self.model.forward(batch, arrived)
        count = batch.num_tokens
        if isinstance(hidden, torch.Tensor):
            if hidden.shape == (count, self._width):
                return hidden
            if batch.logits_rows is not None and hidden.shape == (len(batch.logits_rows), self._width):
                return hidden
        raise PluginError(f"{self._source}: forward of its model gave {_told(hidden)}, not hidden states [{count}, {self._width}]")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, V]."""
        logits = self.model.logits(hidden)
        if not isinstance(logits, torch.Tensor) or logits.shape != (len(hidden), self._vocab_size):
            raise PluginError(
                f"{self._source}: logits of its model gave {_told(logits)} instead of [{len(hidden)}, {self._vocab_size}]"
            )
        return logits


def _told(result: object) -> str:
    return str(list(result.shape)) if isinstance(result, torch.Tensor) else f"{result!r:.60}"
