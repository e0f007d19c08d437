"""The head: from the target's hidden state at a token and the embedding of the next, the hidden state at that next one.

    x = fc([embedding of token p + 1, features at p]),  then one decoder layer without a norm before its attention, and no last norm

EAGLE, arXiv:2401.15077. T tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

import torch

from enginery.api import (
    CARRIED,
    FEATURES,
    Cut,
    DecoderShape,
    ForwardBatch,
    LinearShape,
    ModelContext,
    StageTensors,
)
from enginery.nn.decoder import dense_mlp, layer_attention
from enginery.nn.norm import take_norm
from enginery.nn.rotary import rotary_table
from enginery_draft_eagle.spec.eagle import with_stored_biases


class EagleHead:
    """Embedding and output head are the target's. Implements `enginery.api.Model`."""

    def __init__(self, context: ModelContext, shape: DecoderShape) -> None:
        size, weights = shape.hidden_size, context.weights
        self.target, self.ops, self.comm, self.eps = context.target, context.ops, context.comm, shape.rms_eps
        bias = bool(context.config.get("bias", weights.has("fc.bias")))
        self.fc = weights.linear(LinearShape(names=("fc",), rows=(size,), columns=2 * size, cut=Cut.NONE, bias=bias))
        layer = weights.scope("layers.0")
        self.attention = layer_attention(context, layer, shape=with_stored_biases(shape, layer), index=0)
        self.norm = take_norm(layer, shape.norms.mlp, size, offset=shape.norm_offset)
        self.mlp = dense_mlp(context, layer, shape=shape)
        self.rotary = rotary_table(shape.rope, context.max_positions, dtype=context.dtype, device=context.device)

    def forward(self, batch: ForwardBatch, arrived: StageTensors | None = None) -> torch.Tensor:
        """arrived: FEATURES or CARRIED, [T, C]. What the target's hidden states would be one token further: [T, C]."""
        assert self.target is not None, "a head runs beside its target"
        assert arrived is not None, "a head is given the target's hidden states"
        features = arrived[FEATURES] if FEATURES in arrived else arrived[CARRIED]
        hidden = self.fc(torch.cat((self.target.embedded(batch.input_ids), features), dim=-1))
        delta = self.attention(hidden, self.ops.embed(self.rotary, batch.positions), batch)
        normed = self.comm.add_rms_norm(delta, hidden, self.norm, self.eps)  # adds `delta` to `hidden` in place
        return hidden + self.comm.own_rows_sum(self.mlp(self.comm.all_rows(normed)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, V], by the target's head."""
        assert self.target is not None, "a head runs beside its target"
        return self.target.logits(hidden)
