"""Mamba2: mixers alone, each on the norm of the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from enginery.api import DecoderShape, Model, ModelContext, ModelFacts, RopeShape, WeightSource, whole_number
from enginery_model_mamba.mixers import MixerKeys, memory_of, read_mixer, stated, with_memory

if TYPE_CHECKING:
    from enginery_model_mamba.blocks import OneBlockLayer

KEYS: Final = MixerKeys(
    heads="num_heads",
    head_dim="head_dim",
    groups="n_groups",
    state="state_size",
    conv="conv_kernel",
    expand="expand",
    bias="use_bias",
    out_bias="use_bias",
    conv_bias="use_conv_bias",
    eps="layer_norm_epsilon",
)
# transformers' Mamba2Config, for files that leave them out
DEFAULTS: Final[dict[str, Any]] = {
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "expand": 2,
    "conv_kernel": 4,
    "n_groups": 8,
    "layer_norm_epsilon": 1e-5,
}
NAMES: Final = {"model.embed_tokens": "backbone.embeddings", "model.layers": "backbone.layers", "model.norm": "backbone.norm_f"}
MOST_POSITIONS: Final = 262144  # a state has no longest context, and the tables of requests need one


def shape(config: Mapping[str, Any]) -> DecoderShape:
    """A decoder of which only embedding, norms and head are used."""
    config = {**DEFAULTS, **stated(config)}
    longest = whole_number(config, "max_position_embeddings", MOST_POSITIONS)
    return DecoderShape(
        vocab_size=whole_number(config, "vocab_size"),
        hidden_size=whole_number(config, "hidden_size"),
        intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        rms_eps=float(config["layer_norm_epsilon"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=longest,
        windows=(None,) * whole_number(config, "num_hidden_layers"),
        rope=RopeShape(kind="default", theta=1e4, rotary_dim=2, max_positions=longest, parameters={}),
    )


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    mixer, plain = read_mixer({**DEFAULTS, **stated(config)}, KEYS), shape(config)
    return with_memory(plain.facts(), [[memory_of(mixer.facts)]] * len(plain.windows))


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery.nn.norm import take_norm
    from enginery_model_mamba.blocks import HybridDecoder, Mamba2Mixer, OneBlockLayer

    mixer = read_mixer({**DEFAULTS, **stated(context.config)}, KEYS)

    def layer(context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int) -> OneBlockLayer:
        block = Mamba2Mixer(context, weights.scope("mixer"), spec=context.stage.spec(index, scale=1.0), shape=mixer)
        return OneBlockLayer(context, take_norm(weights, "norm", shape.hidden_size), eps=shape.rms_eps, block=block)

    return HybridDecoder(context, shape(context.config), layer=layer, names=NAMES)
