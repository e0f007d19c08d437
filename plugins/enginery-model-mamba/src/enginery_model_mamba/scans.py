"""Mamba mixers (arXiv:2312.00752), as Jamba has them. T tokens, C hidden size, I inner size, N dims of a state, R step rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from enginery.api import Cut, ForwardBatch, LayerSpec, LinearShape, ModelContext, RecurrentWeights, WeightSource
from enginery.nn.norm import take_norm
from enginery.nn.recurrent import recurrent_facts, take_conv
from enginery_model_mamba.spec.jamba import ScanShape


class MambaMixer:
    """A convolution, then a scan whose steps, keys and queries are products of what the convolution gives, each with a norm."""

    def __init__(self, context: ModelContext, weights: WeightSource, *, specs: Sequence[LayerSpec], shape: ScanShape) -> None:
        """specs: of the convolution and of the scan, with this rank's channels."""
        conv_spec, scan_spec = specs
        of, _ = recurrent_facts(context, conv_spec)
        inner, hidden, state = of.value_heads, context.facts.hidden_size, shape.scan.key_dim
        self.sizes, self.eps = (shape.step_rank, state, state), shape.eps
        self.entry = self.projected = weights.linear(
            LinearShape(names=("in_proj",), rows=(inner, inner), columns=hidden, cut=Cut.ROWS, bias=shape.bias)
        )
        self.mixed = weights.linear(LinearShape(names=("x_proj",), rows=self.sizes, columns=inner, cut=Cut.COLUMNS))
        self.steps = weights.take("dt_proj.weight", (inner, shape.step_rank), dtype=torch.float32, cut=Cut.ROWS)
        self.step_bias = weights.take("dt_proj.bias", (inner,), dtype=torch.float32, cut=Cut.ROWS)
        self.norms = [
            take_norm(weights, f"{name}_layernorm", size) for name, size in zip(("dt", "b", "c"), self.sizes, strict=True)
        ]
        conv, conv_bias = take_conv(weights, "conv1d", of, bias=shape.conv_bias)
        self.conv = dataclasses.replace(conv_spec, recurrent=RecurrentWeights(conv=conv, conv_bias=conv_bias))
        a_log = weights.take("A_log", (inner, state), dtype=torch.float32, cut=Cut.ROWS)
        skip = weights.take("D", (inner,), dtype=torch.float32, cut=Cut.ROWS)
        self.scan = dataclasses.replace(scan_spec, recurrent=RecurrentWeights(a_log=a_log, skip=skip))
        self.out = weights.linear(
            LinearShape(names=("out_proj",), rows=(hidden,), columns=inner, cut=Cut.COLUMNS, bias=shape.bias, complete=False)
        )
        self.rms_norm, self.advance = context.ops.rms_norm, context.advance

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, C]. Returns [T, C]: with several ranks a partial sum. It has no positions."""
        mixed, gate = self.projected(x).chunk(2, dim=-1)  # [T, I] each
        wide = torch.empty((*mixed.shape, 1), dtype=x.dtype, device=x.device)
        self.advance(mixed, x.new_empty((len(x), 0)), self.conv, batch, wide)
        values = wide.squeeze(-1)
        parts = torch.split(self.mixed(values), list(self.sizes), dim=-1)
        low, keys, queries = (
            self.rms_norm(part.contiguous(), norm, self.eps) for part, norm in zip(parts, self.norms, strict=True)
        )
        steps = F.softplus(F.linear(low.float(), self.steps, self.step_bias))  # [T, I]
        out = torch.empty_like(wide)
        self.advance(values, torch.cat((steps, keys.float(), queries.float()), dim=-1), self.scan, batch, out)
        return self.out((out.squeeze(-1).float() * F.silu(gate.float())).to(x.dtype))
