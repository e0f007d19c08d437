"""The heavy part: the core's decoder in GLM's shape."""

from __future__ import annotations

from collections.abc import Sequence

from enginery.api import Model, ModelContext
from enginery.nn.decoder import Decoder
from enginery.nn.moe import expert_layer
from enginery.nn.next_token import NextTokenModule
from enginery_model_glm.spec import module_shape, shape


def build_decoder(context: ModelContext) -> Model:
    """A GLM-4 or GLM-4.5 from its weights."""
    return Decoder(context, shape(context.config), layer=expert_layer)


def build_module(context: ModelContext) -> Model:
    """The layers behind the last. What a guess leaves to the next is behind its norm (vLLM #46075)."""
    decoder, behind = module_shape(context.config), int(context.config["num_hidden_layers"])

    def module(index: int, further: Sequence[Model] = ()) -> NextTokenModule:
        weights = context.weights.scope(f"{decoder.stem}.layers.{behind + index}")
        layer = expert_layer(context, weights, shape=decoder, index=index)
        return NextTokenModule(context, weights, shape=decoder, layer=layer, carries_normed=True, further=further)

    return module(0, [module(index) for index in range(1, len(decoder.windows))])
