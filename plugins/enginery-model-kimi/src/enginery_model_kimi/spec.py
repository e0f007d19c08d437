"""What config.json says, without torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from enginery.api import (
    AttnLayerFacts,
    CheckpointError,
    DecoderShape,
    ExpertNames,
    LatentFacts,
    Model,
    ModelContext,
    ModelFacts,
    RecurrentFacts,
    RopeShape,
    read_decoder_shape,
    read_grouped_experts,
    read_latents,
    whole_number,
)

NAMES: Final = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
LINEAR, FULL = "linear_attention", "full_attention"

# The hub's names of what other families call otherwise; transformers 5 writes the same.
ALIASES: Final = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
# Of `linear_attn_config`, as the hub's files have it, and as transformers writes them.
LINEAR_KEYS: Final = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
# For files that leave them out: the defaults of transformers' KimiLinearConfig.
DEFAULTS: Final[dict[str, Any]] = {
    "first_k_dense_replace": 1,
    "linear_conv_kernel_dim": 4,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "n_group": 1,
    "n_shared_experts": 1,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
}


@dataclass(frozen=True, kw_only=True)
class KimiShape:
    """decoder: what is not attention. linear: by layer, whether it is recurrent. q_rank: None for queries of full rank."""

    decoder: DecoderShape
    linear: tuple[bool, ...]
    rule: RecurrentFacts
    latent: LatentFacts
    q_rank: int | None
    bias: bool

    def facts(self) -> ModelFacts:
        """The part that the core needs."""
        latent, rule, heads = self.latent, self.rule, self.decoder.num_heads
        row, absorbed = latent.rank + latent.rope_dim, latent.activation_width(heads, self.q_rank)
        recurrent = 6 * (rule.mixed_width + rule.gates_width)
        full = AttnLayerFacts(num_heads=heads, num_kv_heads=1, head_dim=row, latent=latent)
        linear = AttnLayerFacts(num_heads=rule.key_heads, num_kv_heads=rule.key_heads, head_dim=rule.key_dim, recurrent=rule)
        kinds = enumerate(linear if is_linear else full for is_linear in self.linear)
        layers = tuple(dataclasses.replace(layer, decoder_layer=index) for index, layer in kinds)
        return self.decoder.facts(layers, width=max(absorbed, recurrent))


def shape(config: Mapping[str, Any]) -> KimiShape:
    """Kimi-Linear's shape. Raises `CheckpointError` for what is not served."""
    config = {**config, **{name: config[hub] for name, hub in ALIASES.items() if hub in config}}
    config = {**DEFAULTS, **config}
    if config.get("moe_router_activation_func", "sigmoid") != "sigmoid":
        raise CheckpointError("config.json has moe_router_activation_func; this architecture is served with 'sigmoid' only")
    if not config.get("mla_use_nope", True):
        raise CheckpointError("config.json has mla_use_nope false; this architecture is served without positions only")
    latent = read_latents(config)
    plain = read_decoder_shape({**config, "head_dim": latent.rope_dim})
    if plain.num_kv_heads != plain.num_heads:
        raise CheckpointError("config.json has num_key_value_heads that differ from num_attention_heads; latents serve every head")
    count = len(plain.windows)
    sparse = _places(config, "mlp_layer_types", {"dense": False, "sparse": True}, count)
    first = {} if sparse is None else {"first_k_dense_replace": 0}  # its default is as many as a model of one layer has
    experts = read_grouped_experts({**config, **first}, scoring="sigmoid")
    if experts is not None:
        experts = dataclasses.replace(experts, names=NAMES, layers=experts.layers if sparse is None else frozenset(sparse))
    stated = config.get("linear_attn_config") or {}
    heads, dim, taps = (
        whole_number(stated, here) if here in stated else whole_number(config, there) for here, there in LINEAR_KEYS.items()
    )
    return KimiShape(
        decoder=dataclasses.replace(plain, experts=experts, rope=_no_rope(plain.rope)),
        linear=_linear(config, stated, count),
        rule=RecurrentFacts(
            rule="delta",
            decay="channel",
            key_heads=heads,
            value_heads=heads,
            key_dim=dim,
            value_dim=dim,
            conv_kernel=taps,
        ),
        latent=latent,
        q_rank=whole_number(config, "q_lora_rank") if config.get("q_lora_rank") else None,
        bias=bool(config.get("attention_bias", False)),
    )


def _no_rope(rope: RopeShape) -> RopeShape:
    """All angles are zero: the latents' rotary part is there, and is not rotated."""
    return dataclasses.replace(rope, kind="linear", parameters={"factor": math.inf})


def _places(config: Mapping[str, Any], key: str, kinds: Mapping[str, bool], count: int) -> list[int] | None:
    """Layers whose kind is one of those that count. None: config.json does not say."""
    stated = config.get(key)
    if stated is None:
        return None
    if len(stated) != count or set(stated) - kinds.keys():
        served = " or ".join(map(repr, kinds))
        raise CheckpointError(f"config.json has {key} {stated!r}; it needs {served} for each of {count} layers")
    return [index for index, kind in enumerate(stated) if kinds[kind]]


def _linear(config: Mapping[str, Any], hub: Mapping[str, Any], count: int) -> tuple[bool, ...]:
    """By `layer_types`, or by the hub's lists, which begin with 1, or as transformers has it by default."""
    places = _places(config, "layer_types", {LINEAR: True, FULL: False}, count)
    if places is None and "kda_layers" in hub and "full_attn_layers" in hub:
        places = [layer - 1 for layer in hub["kda_layers"]]
        if sorted([*places, *(layer - 1 for layer in hub["full_attn_layers"])]) != list(range(count)):
            raise CheckpointError(f"config.json has linear_attn_config whose lists do not name each layer from 1 to {count} once")
    if places is None:
        places = [index for index in range(count) if not index or index % 4]
    return tuple(index in places for index in range(count))


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    return shape(config).facts()


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_kimi.model import build_decoder

    return build_decoder(context)
