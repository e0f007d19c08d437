"""The heavy part: the core's decoder in GLM's shape."""

from __future__ import annotations

from enginery.api import Model, ModelContext
from enginery.nn.decoder import Decoder
from enginery.nn.moe import expert_layer
from enginery.nn.next_token import modules_behind
from enginery_model_glm.spec import module_shape, shape


def build_decoder(context: ModelContext) -> Model:
    """A GLM-4 or GLM-4.5 from its weights."""
    return Decoder(context, shape(context.config), layer=expert_layer)


def build_module(context: ModelContext) -> Model:
    """The layers behind the last. What a guess leaves to the next is behind its norm (vLLM #46075)."""
    return modules_behind(context, module_shape(context.config), expert_layer, carries_normed=True)
