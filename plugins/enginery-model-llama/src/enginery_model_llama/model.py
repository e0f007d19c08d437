"""The heavy part: the core's decoder in Llama's shape, and what its relatives do otherwise.

T tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

import torch

from enginery.api import DecoderShape, Model, ModelContext, WeightSource
from enginery.nn.attention import SelfAttention
from enginery.nn.decoder import Decoder, DecoderLayer, dense_mlp, layer_attention, summed_early
from enginery.nn.moe import expert_layer
from enginery_model_llama.spec import multipliers, shape, unrotated


def build_decoder(context: ModelContext) -> Model:
    """One of the package's families from its weights."""
    of, names = shape(context.config), context.config["architectures"]
    if "Phi3ForCausalLM" in names:
        return Decoder(context, of, layer=packed_layer)
    if "SmolLM3ForCausalLM" in names:
        return PartlyRotated(context, of)
    if "GraniteForCausalLM" in names:
        return ScaledDecoder(context, of)
    return Decoder(context, of, layer=expert_layer)


class PackedAttention(SelfAttention):
    """Of files with queries, keys and values in one piece."""

    qkv_names = ("qkv_proj",)


def packed_layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> DecoderLayer:
    """Phi 3's layer `index`."""
    attention = PackedAttention(
        context,
        weights.scope("self_attn"),
        spec=context.stage.spec(index, scale=shape.head_dim**-0.5),
        qkv_bias=False,
        out_bias=False,
        qk_norm_eps=None,
    )
    mlp = dense_mlp(context, weights, shape=shape)
    return summed_early(context, DecoderLayer(context, weights, shape=shape, attention=attention, mlp=mlp))


class PartlyRotated(Decoder):
    """SmolLM3: in some layers every token is at position 0, whose cosines are 1 and sines 0."""

    def __init__(self, context: ModelContext, shape: DecoderShape) -> None:
        super().__init__(context, shape)
        without, width = unrotated(context.config), self.rotary[0].shape[1]
        self.still = torch.zeros((1, width), dtype=context.dtype, device=context.device)
        self.still[:, : width // 2] = 1.0  # not the first row of the table, which YaRN multiplies
        self.rotary_of = [int(index in without) for index in context.stage.layers]

    def rotations(self, positions: torch.Tensor) -> list[torch.Tensor]:
        """As the base class has it, and that of layers without positions: [T, R]."""
        return [*super().rotations(positions), self.still.expand(len(positions), -1).contiguous()]


class ScaledLayer(DecoderLayer):
    """Granite's: what attention and MLP return is multiplied before it is added."""

    def __init__(self, context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> None:
        attention = layer_attention(context, weights, shape=shape, index=index)
        super().__init__(context, weights, shape=shape, attention=attention, mlp=dense_mlp(context, weights, shape=shape))
        self.factor, _ = multipliers(context.config)

    def feed_forward(self, delta: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """As the base class does it, of the scaled delta, [T, C]; what it returns is scaled."""
        return super().feed_forward(delta * self.factor, residual) * self.factor


class ScaledDecoder(Decoder):
    """Granite: logits are divided by a number."""

    def __init__(self, context: ModelContext, shape: DecoderShape) -> None:
        super().__init__(context, shape, layer=ScaledLayer)
        _, self.logit_scale = multipliers(context.config)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, C] -> [N, V]."""
        return super().logits(hidden) * self.logit_scale
