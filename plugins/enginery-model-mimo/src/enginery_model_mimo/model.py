"""The heavy part: the core's decoder in MiMo's shape, and the layers that predict further tokens.

T tokens, C hidden size, R rotary dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from enginery.api import CARRIED, FEATURES, DecoderShape, ForwardBatch, Model, ModelContext, StageTensors, WeightSource
from enginery.nn.decoder import AttentionBlock, Decoder, DecoderLayer, layer_attention
from enginery.nn.moe import layer_mlp
from enginery.nn.next_token import NextTokenModule, NextTokenNames
from enginery_model_mimo.spec import module_shape, shape, value_scale

NAMES: Final = NextTokenNames("enorm", "hnorm", "eh_proj", "final_layernorm")


class ScaledAttention:
    """Attention whose values are scaled: its output is, for that is linear in them and has no bias."""

    def __init__(self, attention: AttentionBlock, scale: float) -> None:
        self._attention, self._scale = attention, scale

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [T, C], cos_sin [T, R] -> [T, C]."""
        return self._attention(x, cos_sin, batch).mul_(self._scale)


def build_decoder(context: ModelContext) -> Model:
    """A MiMo-V2-Flash from its weights."""
    return Decoder(context, shape(context.config), layer=scaled_layer)


def scaled_layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> DecoderLayer:
    """A layer: attention with scaled values, and experts where it has them."""
    attention: AttentionBlock = layer_attention(context, weights, shape=shape, index=index)
    if (scale := value_scale(context.config)) != 1.0:
        attention = ScaledAttention(attention, scale)
    mlp = layer_mlp(context, weights, shape=shape, index=index)
    return DecoderLayer(context, weights, shape=shape, attention=attention, mlp=mlp)


class TargetsModule:
    """A module of several, each of which is given the target's hidden states: they go on to the next beside its own.

    So it returns [T, 2C]. SGLang and vLLM run the modules so (mimo_v2_flash_nextn.py, mimo_v2_mtp.py).
    """

    def __init__(self, module: NextTokenModule, further: Sequence[Model] = ()) -> None:
        """further: of the first one, the modules behind it."""
        self._module = module
        self.modules = (self, *further)

    def forward(self, batch: ForwardBatch, arrived: StageTensors | None = None) -> torch.Tensor:
        """arrived: FEATURES [T, C] of the first module, CARRIED [T, 2C] of the others."""
        assert arrived is not None, "a module is given hidden states"
        features = arrived[FEATURES] if FEATURES in arrived else arrived[CARRIED].chunk(2, dim=-1)[1]
        return torch.cat((self._module.forward(batch, {FEATURES: features}), features), dim=-1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, 2C] -> [N, V], by the target's head."""
        return self._module.logits(hidden.chunk(2, dim=-1)[0])


def build_modules(context: ModelContext) -> Model:
    """The layers of `model.mtp`. A single one guesses again by what it returned, behind its norm."""
    decoder = module_shape(context.config)

    def module(index: int) -> NextTokenModule:
        weights = context.weights.scope(f"{decoder.stem}.mtp.layers.{index}")
        layer = scaled_layer(context, weights, shape=decoder, index=index)
        return NextTokenModule(context, weights, shape=decoder, layer=layer, carries_normed=True, names=NAMES)

    if len(decoder.windows) == 1:
        return module(0)
    return TargetsModule(module(0), [TargetsModule(module(index)) for index in range(1, len(decoder.windows))])
