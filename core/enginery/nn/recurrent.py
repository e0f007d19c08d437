"""Blocks of recurrent layers: their projections, and what becomes of `advance`'s output.

T tokens, C hidden size, KH, HV: key and value heads, K, V: dims of a head's key and value, W taps of the convolution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from enginery.contracts.attention import LayerSpec
from enginery.contracts.batch import ForwardBatch
from enginery.contracts.memory import RecurrentFacts, RecurrentWeights
from enginery.contracts.model import ModelContext, WeightSource
from enginery.contracts.parallel import Cut
from enginery.contracts.weights import LinearShape, RowOrder
from enginery.errors import Unsupported


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


def undivided(context: ModelContext, spec: LayerSpec, why: str) -> RecurrentFacts:
    """The facts of a recurrent layer that each rank has whole. Raises `Unsupported`, saying `why`, where a rank has some of it."""
    facts = spec.facts.recurrent
    assert facts is not None, "the block is for recurrent layers"
    if facts != context.facts.layers[spec.global_id].recurrent:
        raise Unsupported(why)
    return facts


def _by_key_head(facts: RecurrentFacts, hidden: int) -> LinearShape:
    group = facts.value_heads // facts.key_heads
    qkvz, ba = (facts.key_dim, facts.key_dim, group * facts.value_dim, group * facts.value_dim), (group, group)
    return LinearShape(
        names=("in_proj_qkvz", "in_proj_ba"),
        rows=(facts.key_heads * sum(qkvz), facts.key_heads * sum(ba)),
        columns=hidden,
        cut=Cut.ROWS,
        unit=(sum(qkvz), sum(ba)),
        order=(gather_parts(facts.key_heads, qkvz), gather_parts(facts.key_heads, ba)),
    )


def _apart(facts: RecurrentFacts, hidden: int) -> LinearShape:
    heads = facts.value_heads
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    return LinearShape(names=names, rows=(facts.mixed_width, heads * facts.value_dim, heads, heads), columns=hidden)


class GatedDeltaNet:
    """A gated delta net (arXiv:2412.06464) as Qwen3-Next has it: the output's norm is gated by a SiLU.

    `in_proj_qkvz` and `in_proj_ba` have each key head's parts side by side; in memory they are q, k, v, z, b, a of all heads.
    """

    def __init__(
        self, context: ModelContext, weights: WeightSource, *, spec: LayerSpec, norm_eps: float, apart: bool = False
    ) -> None:
        """spec: without `recurrent`, which is taken here. apart: q, k and v, z, b and a are modules of their own, as Qwen3.5's.

        Raises `Unsupported` on several ranks.
        """
        why = "gated delta nets are not divided among ranks: their convolution's weight has q, k and v in one piece"
        facts, hidden = undivided(context, spec, why), context.facts.hidden_size
        self.projected = weights.linear(_apart(facts, hidden) if apart else _by_key_head(facts, hidden))
        width, heads = facts.mixed_width, facts.value_heads
        recurrent = RecurrentWeights(
            conv=weights.take("conv1d.weight", (width, 1, facts.conv_kernel)).view(width, facts.conv_kernel),
            a_log=weights.take("A_log", (heads,), dtype=torch.float32),
            dt_bias=weights.take("dt_bias", (heads,), dtype=torch.float32),
        )
        self.spec, self.facts, self.norm_eps = dataclasses.replace(spec, recurrent=recurrent), facts, norm_eps
        self.norm = weights.take("norm.weight", (facts.value_dim,))
        columns = heads * facts.value_dim
        self.out = weights.linear(
            LinearShape(names=("out_proj",), rows=(hidden,), columns=columns, cut=Cut.COLUMNS, unit=facts.value_dim, complete=False)
        )
        self.rms_norm, self.advance = context.ops.rms_norm, context.advance

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, C]. Returns [T, C]. It has no positions."""
        facts: RecurrentFacts = self.facts
        sizes = [facts.mixed_width, facts.value_heads * facts.value_dim, facts.gates_width]
        mixed, z, gates = torch.split(self.projected(x), sizes, dim=-1)
        out = torch.empty((len(x), facts.value_heads, facts.value_dim), dtype=x.dtype, device=x.device)  # [T, HV, V]
        self.advance(mixed, gates, self.spec, batch, out)
        normed = self.rms_norm(out.view(-1, facts.value_dim), self.norm, self.norm_eps).view(z.shape)
        return self.out((normed * F.silu(z.float())).to(x.dtype))
