"""Blocks of these families: mixers with states, and what the core's decoder is given in place of its own parts.

T tokens, C hidden size, I inner size, H heads, G groups of heads, W taps of a convolution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from enginery.api import (
    Cut,
    DecoderShape,
    Experts,
    ExpertsShape,
    ForwardBatch,
    LayerSpec,
    Linear,
    LinearShape,
    ModelContext,
    RecurrentWeights,
    WeightSource,
)
from enginery.nn.attention import take_out
from enginery.nn.decoder import AttentionBlock, Decoder, DecoderLayer, LayerFactory
from enginery.nn.norm import GroupedNorm
from enginery.nn.recurrent import recurrent_facts, take_conv
from enginery_model_mamba.mixers import MixerShape


class Renamed:
    """A source that is asked by the core's names and looks for a family's own. Implements `enginery.api.WeightSource`."""

    def __init__(self, weights: WeightSource, names: Mapping[str, str]) -> None:
        """names: of modules, by what the core's blocks call them."""
        self._weights, self._names = weights, names

    def _own(self, name: str) -> str:
        stem = next((stem for stem in self._names if name == stem or name.startswith(f"{stem}.")), None)
        return name if stem is None else self._names[stem] + name.removeprefix(stem)

    def scope(self, prefix: str) -> WeightSource:
        """Below a prefix, names are the family's own again."""
        return self._weights.scope(self._own(prefix))

    def over_lanes(self) -> WeightSource:
        """See `WeightSource`."""
        return Renamed(self._weights.over_lanes(), self._names)

    def linear(self, shape: LinearShape) -> Linear:
        """See `WeightSource`."""
        return self._weights.linear(dataclasses.replace(shape, names=tuple(self._own(name) for name in shape.names)))

    def experts(self, shape: ExpertsShape) -> Experts:
        """See `WeightSource`. Experts' names are data: `ExpertNames`."""
        return self._weights.experts(shape)

    def take(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        cut: Cut = Cut.NONE,
        unit: int | tuple[int, ...] = 1,
        parts: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """See `WeightSource`."""
        return self._weights.take(self._own(name), shape, dtype=dtype, cut=cut, unit=unit, parts=parts)

    def share(self, size: int, *, unit: int = 1) -> range:
        """See `WeightSource`."""
        return self._weights.share(size, unit=unit)

    def own_experts(self, count: int) -> range:
        """See `WeightSource`."""
        return self._weights.own_experts(count)

    def has(self, name: str) -> bool:
        """See `WeightSource`."""
        return self._weights.has(self._own(name))


class HybridDecoder(Decoder):
    """The core's decoder with other names, scaled logits, and attention without positions."""

    def __init__(
        self,
        context: ModelContext,
        shape: DecoderShape,
        *,
        layer: LayerFactory,
        names: Mapping[str, str],
        logit_scale: float = 1.0,
        rotates: bool = True,
    ) -> None:
        """names: see `Renamed`. rotates: whether attention has positions."""
        renamed, self.rotates = Renamed(context.weights, names), rotates
        longest = context.max_positions if rotates else 1
        super().__init__(dataclasses.replace(context, weights=renamed, max_positions=longest), shape, layer=layer)
        self.logit_scale = logit_scale

    def rotations(self, positions: torch.Tensor) -> list[torch.Tensor]:
        """As the base class has it; without positions everything is where position 0 is: cosines of 1, sines of 0."""
        if self.rotates:
            return super().rotations(positions)
        return [table.expand(len(positions), -1).contiguous() for table in self.rotary]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, V]."""
        made = super().logits(hidden)
        return made if self.logit_scale == 1.0 else made * self.logit_scale


class Mamba2Mixer:
    """A Mamba2 layer (arXiv:2405.21060): z, x, B, C and dt are one product, and a norm of each group is gated by SiLU(z)."""

    def __init__(self, context: ModelContext, weights: WeightSource, *, spec: LayerSpec, shape: MixerShape) -> None:
        """spec: with this rank's heads, without `recurrent`, which is taken here."""
        (of, facts), hidden, inner = recurrent_facts(context, spec), context.facts.hidden_size, shape.inner_size
        self.entry = self.projected = weights.linear(
            LinearShape(
                names=("in_proj",),
                rows=(inner, *of.mixed_widths[::-1], of.gates_width),
                columns=hidden,
                cut=Cut.ROWS,
                unit=(of.value_dim, of.value_dim, of.key_dim, of.key_dim, 1),
                bias=shape.bias,
                factor=shape.multipliers,
            )
        )
        self.sizes = (facts.value_heads * facts.value_dim, facts.mixed_width, facts.gates_width)
        self.out = take_out(weights, "out_proj", hidden=hidden, heads=of.value_heads, dim=of.value_dim, bias=shape.out_bias)
        conv, conv_bias = take_conv(weights, "conv1d", of, bias=shape.conv_bias)
        a_log, dt_bias, skip = (
            weights.take(name, (of.value_heads,), dtype=torch.float32, cut=Cut.ROWS) for name in ("A_log", "dt_bias", "D")
        )
        recurrent = RecurrentWeights(conv=conv, conv_bias=conv_bias, a_log=a_log, dt_bias=dt_bias, skip=skip)
        self.spec, self.shape, self.facts = dataclasses.replace(spec, recurrent=recurrent), shape, facts
        self.norm: GroupedNorm | None = None
        if shape.has_norm:
            sizes = {"size": inner, "groups": of.key_heads, "unit": of.value_dim}
            self.norm = GroupedNorm(context, weights, "norm", **sizes, eps=shape.eps)
        self.advance = context.advance

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x: [T, C]. Returns [T, C]: with several ranks a partial sum. It has no positions."""
        z, mixed, gates = torch.split(self.projected(x), list(self.sizes), dim=-1)
        out = torch.empty((len(x), self.facts.value_heads, self.facts.value_dim), dtype=x.dtype, device=x.device)
        self.advance(mixed, gates, self.spec, batch, out)
        return self.out(self._gated(out.view(z.shape), z))

    def _gated(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """The norm of y, within each group, and the gate z: [T, I]."""
        if self.norm is None:
            return (y.float() * F.silu(z.float())).to(y.dtype)
        return self.norm(y, z, "silu", gate_first=self.shape.gate_first)


class OneBlockLayer(DecoderLayer):
    """A decoder layer that is one block on the norm of the residual stream: a mixer, attention, or a feed-forward of all lanes."""

    def __init__(
        self,
        context: ModelContext,
        norm: torch.Tensor,
        *,
        eps: float,
        block: AttentionBlock | None = None,
        mlp: Callable[[torch.Tensor], torch.Tensor] | None = None,
        behind_mlp: bool = False,
    ) -> None:
        """norm: [C]. block, mlp: the one that it is; gives partial sums. behind_mlp: whether the layer before is a feed-forward."""
        self.norm, self.eps, self.attention, self._mlp = norm, eps, block or _as_it_is, mlp
        self.comm, self.rms_norm, self._behind_mlp = context.comm, context.ops.rms_norm, behind_mlp

    def attention_input(self, delta: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Adds `delta`, the last layer's output, to the residual stream in place and returns it normalised: all [T, C]."""
        if delta is None:
            return self.rms_norm(residual, self.norm, self.eps)
        return self.comm.add_rms_norm(delta, residual, self.norm, self.eps, of_all_lanes=self._behind_mlp)

    def add_mlp_output(self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Adds what `feed_forward` returned to the residual stream in place; its norm: [T, C]."""
        return self.comm.add_rms_norm(delta, residual, weight, self.eps, of_all_lanes=self._mlp is not None)

    def feed_forward(self, delta: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Of rows [T, C], of which this is all; behind a block there is none: its output, [T, C]."""
        return delta if self._mlp is None else self._mlp(self.comm.all_rows(delta))


def _as_it_is(x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """In place of attention, in a layer that has none."""
    return x
