"""The heavy part: the core's decoder in gpt-oss' shape."""

from __future__ import annotations

from enginery.api import Model, ModelContext
from enginery.nn.decoder import Decoder
from enginery.nn.moe import expert_layer
from enginery_model_gpt_oss.spec import shape


def build_decoder(context: ModelContext) -> Model:
    """A gpt-oss from its weights."""
    return Decoder(context, shape(context.config), layer=expert_layer)
