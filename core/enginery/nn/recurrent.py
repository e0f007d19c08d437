"""Blocks of recurrent layers: their projections, and what becomes of `advance`'s output.

T tokens, C hidden size, KH, HV: key and value heads, K, V: dims of a head's key and value, W taps of the convolution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from enginery.contracts.attention import LayerSpec
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.memory import RecurrentFacts, RecurrentWeights
from enginery.contracts.model import ModelContext, WeightSource
from enginery.contracts.parallel import Cut
from enginery.contracts.weights import LinearShape, RowOrder
from enginery.nn.attention import take_out


def gather_parts(count: int, sizes: Sequence[int]) -> RowOrder:
    """Of `count` blocks, each of parts of these sizes: all first parts, then all second ones, and so on."""
    block, starts = sum(sizes), [sum(sizes[:index]) for index in range(len(sizes))]
    return RowOrder(
        tuple(
            index * block + start + row
            for start, size in zip(starts, sizes, strict=True)
            for index in range(count)
            for row in range(size)
        )
    )


def recurrent_facts(context: ModelContext, spec: LayerSpec) -> tuple[RecurrentFacts, RecurrentFacts]:
    """Of a recurrent layer: those of all ranks, whose sizes are the checkpoint's, and this rank's."""
    of, facts = context.facts.layers[spec.global_id].recurrent, spec.facts.recurrent
    assert of is not None, "the block is for recurrent layers"
    assert facts is not None, "a rank's layer is of the same kind"
    return of, facts


def take_conv(
    weights: WeightSource, name: str, of: RecurrentFacts, *, bias: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight [C, W] and bias [C] of a convolution of each channel of `mixed`, in module `name`. of: of all ranks."""
    several = list(zip(of.mixed_widths, (of.key_dim, of.key_dim, of.value_dim), strict=True))
    parts, units = zip(*((part, unit) for part, unit in (several[::-1] if of.ssm else several) if part), strict=True)
    width = of.mixed_width
    weight = weights.take(f"{name}.weight", (width, 1, of.conv_kernel), cut=Cut.ROWS, unit=units, parts=parts)
    taken = weights.take(f"{name}.bias", (width,), cut=Cut.ROWS, unit=units, parts=parts) if bias else None
    return weight.squeeze(1), taken


def _by_key_head(of: RecurrentFacts, hidden: int, *, key_heads: int) -> LinearShape:
    """key_heads: of this rank."""
    group = of.value_heads // of.key_heads
    qkvz, ba = (of.key_dim, of.key_dim, group * of.value_dim, group * of.value_dim), (group, group)
    return LinearShape(
        names=("in_proj_qkvz", "in_proj_ba"),
        rows=(of.key_heads * sum(qkvz), of.key_heads * sum(ba)),
        columns=hidden,
        cut=Cut.ROWS,
        unit=(sum(qkvz), sum(ba)),
        order=(gather_parts(key_heads, qkvz), gather_parts(key_heads, ba)),
    )


def _apart(of: RecurrentFacts, hidden: int) -> LinearShape:
    heads, dim = of.value_heads, of.value_dim
    return LinearShape(
        names=("in_proj_qkv", "in_proj_qkv", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
        rows=(*of.mixed_widths, heads * dim, heads, heads),
        columns=hidden,
        cut=Cut.ROWS,
        unit=(of.key_dim, of.key_dim, dim, dim, 1, 1),
    )


class GatedDeltaNet:
    """A gated delta net (arXiv:2412.06464) as Qwen3-Next has it: the output's norm is gated by a SiLU.

    `in_proj_qkvz` and `in_proj_ba` have each key head's parts side by side; in memory they are q, k, v, z, b, a of all heads.
    """

    def __init__(
        self, context: ModelContext, weights: WeightSource, *, spec: LayerSpec, norm_eps: float, apart: bool = False
    ) -> None:
        """spec: without `recurrent`, which is taken here. apart: q, k and v, z, b and a are modules of their own, as Qwen3.5's."""
        (of, facts), hidden = recurrent_facts(context, spec), context.facts.hidden_size
        shape = _apart(of, hidden) if apart else _by_key_head(of, hidden, key_heads=facts.key_heads)
        self.entry = self.projected = weights.linear(shape)
        a_log, dt_bias = (weights.take(name, (of.value_heads,), dtype=torch.float32, cut=Cut.ROWS) for name in ("A_log", "dt_bias"))
        recurrent = RecurrentWeights(conv=take_conv(weights, "conv1d", of)[0], a_log=a_log, dt_bias=dt_bias)
        self.spec, self.facts, self.norm_eps = dataclasses.replace(spec, recurrent=recurrent), facts, norm_eps
        self.norm = weights.take("norm.weight", (facts.value_dim,))
        self.out = take_out(weights, "out_proj", hidden=hidden, heads=of.value_heads, dim=facts.value_dim)
        self.gated_rms_norm, self.advance = context.ops.gated_rms_norm, context.advance

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, C]. Returns [T, C]: with several ranks a partial sum. It has no positions."""
        facts: RecurrentFacts = self.facts
        sizes = [facts.mixed_width, facts.value_heads * facts.value_dim, facts.gates_width]
        mixed, z, gates = torch.split(self.projected(x), sizes, dim=-1)
        out = torch.empty((len(x), facts.value_heads, facts.value_dim), dtype=x.dtype, device=x.device)  # [T, HV, V]
        self.advance(mixed, gates, self.spec, batch, out)
        return self.out(self.gated_rms_norm(out, z.view(out.shape), self.norm, self.norm_eps, "silu").view(len(x), -1))
