"""The heavy part: two attentions and two MLPs a layer, a mixture of experts beside the second pair, experts that do nothing.

    residual ─ attention 0 ─┬─ MLP 0 ─ attention 1 ─ MLP 1 ─┬─
                            └────── mixture of experts ─────┘

T tokens of this lane, A of all lanes, N rows that go on, C hidden size, E experts with weights, Z zero experts, K of each token.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Final

import torch

from enginery.api import (
    DecoderShape,
    ExpertsShape,
    ForwardBatch,
    Model,
    ModelContext,
    NormNames,
    Routed,
    StageTensors,
    WeightSource,
)
from enginery.nn.decoder import Decoder, DecoderLayer, GatedMLP
from enginery.nn.latent_attention import LatentSelfAttention
from enginery_model_longcat.spec import LongcatShape
from enginery_model_longcat.spec import shape as read_shape

LATENT_NORM_EPS: Final = 1e-6  # of the norms inside the attention; `rms_norm_eps` is for the others (modeling_longcat_flash.py)


def build_decoder(context: ModelContext) -> Model:
    """A LongCat-Flash from its weights."""
    return ShortcutDecoder(context, read_shape(context.config))


def _half_layer(
    context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int, half: int, longcat: LongcatShape
) -> DecoderLayer:
    """Attention 0 or 1 of decoder layer `index`, with the MLP behind it and the norms of both."""
    attention = LatentSelfAttention(
        context,
        weights.scope(f"self_attn.{half}"),
        spec=context.stage.specs(index, scale=longcat.scale)[half],
        q_rank=longcat.q_rank,
        bias=longcat.bias,
        norm_eps=LATENT_NORM_EPS,
    )
    attention.latent_norm = attention.latent_norm.clone().mul_(longcat.latent_scale)  # what is scaled is what the norm gives
    mlp = GatedMLP(context, weights.scope(f"mlps.{half}"), intermediate_size=shape.intermediate_size, bias=False)
    norms = NormNames(attention=f"input_layernorm.{half}", mlp=f"post_attention_layernorm.{half}")
    return DecoderLayer(context, weights, shape=dataclasses.replace(shape, norms=norms), attention=attention, mlp=mlp)


class ShortcutMixture:
    """Experts of which some have no weights and give back what they are given, times the router's weight (arXiv:2509.01322).

    What those give is added to the residual stream, which every rank has whole, and not to the partial sum of the others.
    """

    def __init__(self, context: ModelContext, weights: WeightSource, *, longcat: LongcatShape) -> None:
        mixture, hidden, ops = longcat.mixture, context.facts.hidden_size, context.ops
        total, names = mixture.num_experts, mixture.names
        self.num_experts = longcat.num_experts
        self.experts = weights.experts(
            ExpertsShape(
                names=names, count=self.num_experts, inner=mixture.inner_size, hidden=hidden, activation=mixture.activation
            )
        )
        wide = weights.take(f"{names.router}.weight", (total, hidden), dtype=torch.float32)
        self.router = ops.bind_linear(wide, None)
        self.bias = weights.take(names.correction, (total,), dtype=torch.float32)
        self.choose, self.routing = ops.route, mixture.routing

    def __call__(self, x: torch.Tensor, everyone: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [N, C] of this lane, everyone: [A, C], the rows of all lanes, x itself where there is one.

        Returns what the experts with weights give to everyone, [A, C], with several ranks a partial sum, and what the others give
        to x, [N, C], whole.
        """
        routed, share = self.route(x)
        kept = (x * share).to(x.dtype)
        return self.experts(everyone, routed if everyone is x else self.route(everyone)[0]), kept

    def route(self, x: torch.Tensor) -> tuple[Routed, torch.Tensor]:
        """[N, C] -> each token's experts with weights, and the sum of the weights of its others, [N, 1] float32.

        Kernels take K experts of each token, no fewer. So a zero expert is replaced by one of the token's own, which is read
        anyway, with a weight of zero.
        """
        ids, weights = self.choose(self.router(x.float()), self.bias, self.routing)  # [N, K] each
        is_zero = ids >= self.num_experts
        share = (weights * is_zero).sum(-1, keepdim=True)
        own = ids.amin(-1, keepdim=True).clamp(max=self.num_experts - 1)  # [N, 1]
        return Routed(torch.where(is_zero, own, ids), weights.masked_fill(is_zero, 0.0)), share


class ShortcutDecoder(Decoder):
    """The core's decoder over first halves of layers, with the second halves and the mixtures beside it."""

    def __init__(self, context: ModelContext, longcat: LongcatShape) -> None:
        super().__init__(context, longcat.decoder, layer=partial(_half_layer, half=0, longcat=longcat))
        below = context.weights.scope(f"{longcat.decoder.stem}.layers")
        scopes = [(index, below.scope(str(index))) for index in context.stage.layers]
        self.second_halves = [
            _half_layer(context, weights, shape=longcat.decoder, index=index, half=1, longcat=longcat) for index, weights in scopes
        ]
        self.mixtures = [ShortcutMixture(context, weights.scope("mlp"), longcat=longcat) for _, weights in scopes]

    def forward(self, batch: ForwardBatch, arrived: StageTensors | None = None) -> torch.Tensor | StageTensors:
        """Hidden states after the last norm: [T, C], or [N, C] of the rows that need logits; before the last stage what crosses.

        Of the last layer, everything behind the last attention is computed for those rows alone, and the mixture too.
        """
        delta, residual = self._begin(batch, arrived)
        cos_sin = self.embed(self.rotary[0], batch.positions)  # [T, R]
        halves = zip(self.stage.layers, self.layers, self.second_halves, self.mixtures, strict=True)
        for index, first, second, mixture in halves:
            rows = batch.logits_rows if self.stage.is_last and second is self.second_halves[-1] else None
            x = first.attention_input(delta, residual)
            self.tap(batch, residual, index)
            delta = first.attention(x, cos_sin, batch)
            x = self.comm.add_rms_norm(delta, residual, first.mlp_norm, first.eps)
            everyone = self.comm.all_rows(x)
            delta = first.mlp(everyone)
            if rows is not None:
                x = x.index_select(0, rows)
                everyone = self.comm.all_rows(x)
            shortcut, kept = mixture(x, everyone)
            delta = second.attention(second.attention_input(delta, residual), cos_sin, batch)
            if rows is not None:
                delta, residual = delta.index_select(0, rows), residual.index_select(0, rows)
            delta = second.feed_forward(delta, residual).add_(shortcut)
            residual.add_(kept)
        assert delta is not None, "a stage has layers"
        if self.norm is None:
            return {"delta": delta, "residual": residual}
        hidden = self.second_halves[-1].add_mlp_output(delta, residual, self.norm)
        self.tap(batch, residual, self.stage.layers.stop)
        self.tap(batch, hidden, self.stage.layers.stop, "final")
        return hidden
