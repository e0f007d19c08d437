"""The heavy part: the core's decoder with latent attention in every layer, and experts in most."""

from __future__ import annotations

from functools import partial
from typing import Final

from enginery.api import DecoderShape, Model, ModelContext, WeightSource
from enginery.nn.decoder import Decoder, DecoderLayer
from enginery.nn.latent_attention import LatentSelfAttention
from enginery.nn.moe import layer_mlp
from enginery.nn.next_token import modules_behind
from enginery_model_deepseek.spec import FLASH, DeepseekShape, module_shape
from enginery_model_deepseek.spec import shape as read_shape

LATENT_NORM_EPS: Final = 1e-6  # of the norms inside the attention; `rms_norm_eps` is for the others (modeling_deepseek_v2.py)


def build_decoder(context: ModelContext) -> Model:
    """A DeepSeek-V2 or V3 from its weights."""
    deepseek = read_shape(context.config)
    return Decoder(context, deepseek.decoder, layer=partial(_layer, deepseek=deepseek))


def build_module(context: ModelContext) -> Model:
    """The layers behind the last. GLM norms what a guess leaves to the next, DeepSeek does not (vLLM #46075)."""
    deepseek, normed = module_shape(context.config), FLASH in context.config["architectures"]
    return modules_behind(context, deepseek.decoder, partial(_layer, deepseek=deepseek), carries_normed=normed)


def _layer(
    context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int, deepseek: DeepseekShape
) -> DecoderLayer:
    attention = LatentSelfAttention(
        context,
        weights.scope("self_attn"),
        spec=context.stage.spec(index, scale=deepseek.scale),
        q_rank=deepseek.q_rank,
        bias=deepseek.bias,
        norm_eps=LATENT_NORM_EPS,
    )
    mlp = layer_mlp(context, weights, shape=shape, index=index)
    return DecoderLayer(context, weights, shape=shape, attention=attention, mlp=mlp)
