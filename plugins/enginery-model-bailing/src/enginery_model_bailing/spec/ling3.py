"""What config.json of Ling-3.0 says, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from enginery.api import (
    CheckpointError,
    MixtureShape,
    Model,
    ModelContext,
    ModelFacts,
    RecurrentFacts,
    latent_softmax_scale,
    read_decoder_shape,
    read_grouped_experts,
    read_latents,
    required,
    whole_number,
)
from enginery_model_bailing.spec import ring

# transformers stores the last product of either attention as `dense`; the hub's files have `o_proj` in recurrent layers.
STACKED: Final = (
    ring.STACKED
    | {".attention.dense.weight": (".attention.o_proj.weight",)}
    # As transformers has them in memory: the convolutions of q, k and v are one there.
    | {
        "model.embed_tokens.weight": ("model.word_embeddings.weight",),
        **{f".self_attn.forget_gate.{name}": (f".attention.{name}",) for name in ("f_proj.weight", "A_log", "dt_bias")},
        **{
            f".self_attn.{name}.weight": (f".attention.{name}.weight",)
            for name in (
                *("q_proj", "k_proj", "v_proj", "b_proj", "g_proj", "o_norm", "o_proj", "conv1d"),
                *("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"),
            )
        },
    }
)

# What other families call otherwise, as transformers writes it, and as the hub's files have it.
ALIASES: Final = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
SERVED: Final[dict[str, Any]] = {
    "attention_bias": False,
    "gated_attention_proj_granularity_type": "head_wise",
    "moe_router_enable_expert_bias": True,
    "no_kda_lora": True,
    "rope_interleave": True,
    "score_function": "sigmoid",
    "use_bias": False,
    "use_kda_lora": False,
    "use_mla_nope": False,
    "use_qkv_bias": False,
    "value_norm": False,
}
ROPE_THETA: Final = 6e6  # for files that leave it out: the default of transformers' BailingHybridConfig
LIMITS: Final = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
LINEAR, FULL, DENSE, SPARSE = "linear_attention", "full_attention", "dense", "sparse"


class LingShape(ring.HybridShape):
    """Ling-3.0's."""

    @property
    def recurrent_width(self) -> int:
        """Queries, keys, values and gates count, and what is made of them."""
        return 6 * (self.rule.mixed_width + self.rule.gates_width)


def shape(config: Mapping[str, Any]) -> LingShape:
    """Ling-3.0's shape. Raises `CheckpointError` for what is not served."""
    ring.check_served(config, SERVED)
    for key in LIMITS:
        if any(config.get(key) or ()):
            raise CheckpointError(f"config.json has {key}, and experts with limits are not served for this architecture")
    config = {"rope_theta": ROPE_THETA, **config, **{name: config[other] for name, other in ALIASES.items() if other in config}}
    latent, dim = read_latents(config), whole_number(config, "linear_head_dim", whole_number(config, "head_dim"))
    plain = read_decoder_shape({**config, "head_dim": latent.rope_dim})
    heads, count = plain.num_heads, len(plain.windows)
    if plain.num_kv_heads != heads:
        raise CheckpointError("config.json has num_key_value_heads that differ from num_attention_heads; latents serve every head")
    floor = None
    if config.get("kda_safe_gate", True):
        floor = float(required({"kda_lower_bound": -5.0, **config}, "kda_lower_bound"))
    return LingShape(
        decoder=dataclasses.replace(
            plain,
            embedding="word_embeddings",
            experts=_experts(config, count),
            # `partial_rotary_factor` is of a whole head; the rotated part of latents is stated by its own name
            rope=dataclasses.replace(plain.rope, rotary_dim=latent.rope_dim),
        ),
        linear=_linear(config, count),
        rule=RecurrentFacts(
            rule="delta",
            decay="channel",
            key_heads=heads,
            value_heads=heads,
            key_dim=dim,
            value_dim=dim,
            conv_kernel=whole_number(config, "short_conv_kernel_size", 4),
            gate_floor=floor,
        ),
        latent=latent,
        scale=latent_softmax_scale(latent.nope_dim + latent.rope_dim, plain.rope),
        q_rank=whole_number(config, "q_lora_rank") if config.get("q_lora_rank") else None,
    )


def _experts(config: Mapping[str, Any], count: int) -> MixtureShape | None:
    experts = read_grouped_experts({**config, "n_routed_experts": ring.num_experts(config)}, scoring="sigmoid")
    if experts is None:
        return None
    for key in ("n_group", "topk_group", "routed_scaling_factor"):
        required(config, key)
    sparse = _stated(config, "mlp_layer_types", SPARSE, DENSE, count)
    inner = config.get("moe_shared_expert_intermediate_size") or experts.inner_size
    return dataclasses.replace(
        experts,
        names=ring.NAMES,
        layers=experts.layers if sparse is None else frozenset(index for index in range(count) if sparse[index]),
        shared_size=inner * whole_number(config, "n_shared_experts", 0),
    )


def _linear(config: Mapping[str, Any], count: int) -> tuple[bool, ...]:
    """By `layer_types`, or all but the last of each group, and but those behind the last whole group."""
    every, stated = whole_number(config, "layer_group_size"), _stated(config, "layer_types", LINEAR, FULL, count)
    return stated or tuple((index + 1) % every > 0 and index < count // every * every for index in range(count))


def _stated(config: Mapping[str, Any], key: str, one: str, other: str, count: int) -> tuple[bool, ...] | None:
    """By layer, whether it is stated to be `one`. None: config.json does not say."""
    kinds = config.get(key)
    if kinds is None:
        return None
    if len(kinds) != count or set(kinds) - {one, other}:
        raise CheckpointError(f"config.json has {key} {kinds!r}; it needs {one!r} or {other!r} for each of {count} layers")
    return tuple(kind == one for kind in kinds)


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    return shape(config).facts()


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_bailing.ling3_model import build_decoder

    return build_decoder(context)
