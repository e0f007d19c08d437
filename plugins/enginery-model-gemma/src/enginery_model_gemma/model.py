"""The heavy part: the core's decoder in Gemma's shape."""

from __future__ import annotations

from enginery.api import Model, ModelContext
from enginery.nn.decoder import Decoder
from enginery_model_gemma.spec import shape


def build_decoder(context: ModelContext) -> Model:
    """A Gemma 2 or 3 from its weights."""
    return Decoder(context, shape(context.config))
