"""The heavy part: the core's decoder in Gemma's shape."""

from __future__ import annotations

import dataclasses
from typing import Final

from enginery.api import Model, ModelContext
from enginery.nn.decoder import Decoder
from enginery_model_gemma.spec import shape

STEMS: Final = ("language_model.model", "model.language_model", "model")  # the hub's, transformers 4.52's, of text alone


def build_decoder(context: ModelContext) -> Model:
    """A Gemma 2 or 3 from its weights, by the names that the files have; config.json does not tell them apart."""
    decoder = shape(context.config)
    stems = (stem for stem in STEMS if context.weights.has(f"{stem}.norm.weight"))
    return Decoder(context, dataclasses.replace(decoder, stem=next(stems, decoder.stem)))
