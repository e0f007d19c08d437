"""The heavy part: the core's decoder in Qwen's shape."""

from __future__ import annotations

from enginery.api import Model, ModelContext
from enginery.nn.decoder import Decoder
from enginery.nn.moe import expert_layer
from enginery_model_qwen.spec import shape


def build_decoder(context: ModelContext) -> Model:
    """A Qwen2 or Qwen3 from its weights, with or without experts."""
    return Decoder(context, shape(context.config), layer=expert_layer)
