"""The heavy part: the core's decoder in Llama's shape."""

from __future__ import annotations

from enginery.api import Model, ModelContext
from enginery.nn.decoder import Decoder
from enginery.nn.moe import expert_layer
from enginery_model_llama.spec import shape


def build_decoder(context: ModelContext) -> Model:
    """A Llama, Mistral or Mixtral from its weights."""
    return Decoder(context, shape(context.config), layer=expert_layer)
