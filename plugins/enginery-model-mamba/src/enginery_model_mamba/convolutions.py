"""Short convolutions with gates, as LFM2 has them. T tokens, C hidden size."""

from __future__ import annotations

import dataclasses

import torch

from enginery.api import Cut, ForwardBatch, LayerSpec, LinearShape, ModelContext, RecurrentWeights, WeightSource
from enginery.nn.recurrent import recurrent_facts, take_conv


class ShortConvolution:
    """out(c * conv(b * x)) of b, c and x from one product: a convolution of each channel, without an activation."""

    def __init__(self, context: ModelContext, weights: WeightSource, *, spec: LayerSpec, bias: bool) -> None:
        """spec: with this rank's channels, without `recurrent`, which is taken here. bias: of all three."""
        (of, _), hidden = recurrent_facts(context, spec), context.facts.hidden_size
        self.entry = self.projected = weights.linear(
            LinearShape(names=("in_proj",), rows=(hidden,) * 3, columns=hidden, cut=Cut.ROWS, bias=bias)
        )
        self.out = weights.linear(
            LinearShape(names=("out_proj",), rows=(hidden,), columns=hidden, cut=Cut.COLUMNS, bias=bias, complete=False)
        )
        conv, conv_bias = take_conv(weights, "conv", of, bias=bias)
        self.spec = dataclasses.replace(spec, recurrent=RecurrentWeights(conv=conv, conv_bias=conv_bias))
        self.advance = context.advance

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, C]. Returns [T, C]: with several ranks a partial sum. It has no positions."""
        b, c, inner = self.projected(x).chunk(3, dim=-1)
        made = torch.empty((*inner.shape, 1), dtype=x.dtype, device=x.device)
        self.advance(b * inner, x.new_empty((len(x), 0)), self.spec, batch, made)
        return self.out(c * made.squeeze(-1))
