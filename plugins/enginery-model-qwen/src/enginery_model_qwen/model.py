"""The heavy part: the core's dense decoder in Qwen's shape."""

from __future__ import annotations

from enginery.api import Model, ModelContext
from enginery.nn.decoder import Decoder
from enginery_model_qwen.spec import shape


def build_decoder(context: ModelContext) -> Model:
    """A Qwen2 or Qwen3 from its weights."""
    return Decoder(context, shape(context.config))
