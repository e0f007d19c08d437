"""What config.json of Ling 2.0 and of Ling 1 says, without torch. They differ in how a token's experts are chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from enginery.api import (
    CheckpointError,
    DecoderShape,
    MixtureShape,
    Model,
    ModelContext,
    ModelFacts,
    RopeShape,
    Routing,
    next_token_drafter,
    num_next_layers,
    read_decoder_shape,
    read_grouped_experts,
    required,
    whole_number,
)
from enginery_model_bailing.spec.ring import NAMES, STACKED, check_served, num_experts

SERVED: Final[dict[str, Any]] = {
    "norm_head": False,
    "norm_softmax": False,
    "norm_topk_prob": True,
    "use_bias": False,
    "use_rmsnorm": True,
    "use_sliding_window": False,
}
SOFTMAX: Final = SERVED | {
    "moe_router_enable_expert_bias": False,
    "n_group": 1,
    "routed_scaling_factor": 1.0,
    "score_function": "softmax",
    "use_qk_norm": False,
}
SIGMOID: Final = SERVED | {"moe_router_enable_expert_bias": True, "score_function": "sigmoid", "use_qk_norm": True}


def shape(config: Mapping[str, Any]) -> DecoderShape:
    """Ling's shape. Raises `CheckpointError` for what is not served."""
    is_second = "BailingMoeV2ForCausalLM" in config["architectures"]
    check_served(config, SIGMOID if is_second else SOFTMAX)
    plain = read_decoder_shape(
        config,
        qkv_bias=bool(config.get("use_qkv_bias")),
        qk_norm=is_second,
        experts=_chosen_by_sigmoid(config) if is_second else _chosen_by_softmax(config),
    )
    return dataclasses.replace(plain, embedding="word_embeddings", rope=_rope(config, plain))


def _rope(config: Mapping[str, Any], plain: DecoderShape) -> RopeShape:
    """Ling-1T states how many dims of a head are rotated in place of which part of them; some files state both."""
    if not config.get("rotary_dim"):
        return plain.rope
    rotary, by_factor = whole_number(config, "rotary_dim"), plain.rope.rotary_dim
    if rotary > plain.head_dim or by_factor not in (rotary, plain.head_dim):
        raise CheckpointError(
            f"config.json has rotary_dim {rotary}, and partial_rotary_factor for {by_factor} of a head's {plain.head_dim} dims; "
            "the two must say the same"
        )
    return dataclasses.replace(plain.rope, rotary_dim=rotary)


def _shared_size(config: Mapping[str, Any]) -> int:
    own = whole_number(config, "moe_shared_expert_intermediate_size", whole_number(config, "moe_intermediate_size"))
    return own * whole_number(config, "num_shared_experts", 0)


def _chosen_by_sigmoid(config: Mapping[str, Any]) -> MixtureShape | None:
    """As DeepSeek-V3's."""
    for key in ("n_group", "topk_group", "routed_scaling_factor"):  # programs that read files without them differ
        required(config, key)
    experts = read_grouped_experts({**config, "n_routed_experts": num_experts(config)}, scoring="sigmoid")
    return experts and dataclasses.replace(experts, names=NAMES, shared_size=_shared_size(config))


def _chosen_by_softmax(config: Mapping[str, Any]) -> MixtureShape:
    first, count = whole_number(config, "first_k_dense_replace", 0), whole_number(config, "num_hidden_layers")
    return MixtureShape(
        layers=frozenset(range(first, count)),
        num_experts=whole_number(config, "num_experts"),
        inner_size=whole_number(config, "moe_intermediate_size"),
        routing=Routing(top_k=whole_number(config, "num_experts_per_tok"), renormalise=True),
        shared_size=_shared_size(config),
    )


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    return shape(config).facts()


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_bailing.ling_model import build_decoder

    return build_decoder(context)


def module_shape(config: Mapping[str, Any]) -> DecoderShape:
    """Of the layers behind the last."""
    return shape(config).one_more(num_next_layers(config))


def build_modules(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_bailing.ling_model import build_modules

    return build_modules(context)


MTP: Final = next_token_drafter(
    "BailingMoeV2ForCausalLM",
    describe=lambda config: module_shape(config).facts(),
    build=build_modules,
    point="final",
    stacked_weights=STACKED,
)
