"""What config.json says, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from enginery.api import (
    AttnLayerFacts,
    CheckpointError,
    DecoderShape,
    LatentFacts,
    MixtureShape,
    Model,
    ModelContext,
    ModelFacts,
    latent_softmax_scale,
    next_layers,
    next_token_drafter,
    num_next_layers,
    read_decoder_shape,
    read_grouped_experts,
    read_latents,
    required,
    whole_number,
)

FLASH: Final = "Glm4MoeLiteForCausalLM"
# For files that leave them out: the defaults of transformers' DeepseekV3Config, which DeepSeek's own code has too, and of its
# Glm4MoeLiteConfig.
V3_DEFAULTS: Final[dict[str, Any]] = {
    "first_k_dense_replace": 3,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}
FLASH_DEFAULTS: Final[dict[str, Any]] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "q_lora_rank": 768,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
}


@dataclass(frozen=True, kw_only=True)
class DeepseekShape:
    """decoder: what is not attention. q_rank: `q_lora_rank`, None for full rank. scale: of q . k. bias: `attention_bias`."""

    decoder: DecoderShape
    latent: LatentFacts
    q_rank: int | None
    scale: float
    bias: bool

    def facts(self) -> ModelFacts:
        """The part that the core needs."""
        latent, heads = self.latent, self.decoder.num_heads
        layer = AttnLayerFacts(num_heads=heads, num_kv_heads=1, head_dim=latent.rank + latent.rope_dim, latent=latent)
        layers = tuple(dataclasses.replace(layer, decoder_layer=index) for index in range(len(self.decoder.windows)))
        return self.decoder.facts(layers, width=latent.activation_width(heads, self.q_rank))


def shape(config: Mapping[str, Any]) -> DeepseekShape:
    """DeepSeek-V2's or V3's shape; GLM-4.7-Flash has V3's. Raises `CheckpointError` for what contradicts itself."""
    is_flash = FLASH in config["architectures"]
    is_v3 = is_flash or "DeepseekV3ForCausalLM" in config["architectures"]
    if is_v3:
        config = {**(FLASH_DEFAULTS if is_flash else V3_DEFAULTS), **config}
    if is_v3 and not config.get("rope_interleave", True):
        raise CheckpointError("config.json has rope_interleave false; this architecture rotates pairs of neighbouring dims only")
    latent = read_latents(config)
    decoder = read_decoder_shape(
        {**config, "head_dim": latent.rope_dim},
        mlp_bias=bool(config.get("mlp_bias", False)) and not is_v3,
        experts=_experts(config, is_v3=is_v3),
    )
    if decoder.num_kv_heads != decoder.num_heads:
        raise CheckpointError(
            f"config.json has num_key_value_heads {decoder.num_kv_heads} and num_attention_heads {decoder.num_heads}; latent "
            "attention makes keys and values for every head, so the two must be equal, or the first left out"
        )
    if decoder.rope.rotary_dim != latent.rope_dim or latent.rope_dim % 2:
        raise CheckpointError(
            f"config.json rotates {decoder.rope.rotary_dim} of qk_rope_head_dim={latent.rope_dim} dims; this architecture rotates "
            "all of them, in pairs: take partial_rotary_factor out of config.json, or correct qk_rope_head_dim"
        )
    required(config, "q_lora_rank", null="queries of full rank")
    required(config, "n_routed_experts", null="dense layers alone")
    return DeepseekShape(
        decoder=decoder,
        latent=latent,
        q_rank=None if config["q_lora_rank"] is None else whole_number(config, "q_lora_rank"),
        scale=latent_softmax_scale(latent.nope_dim + latent.rope_dim, decoder.rope),
        bias=bool(config.get("attention_bias", False)),
    )


def _experts(config: Mapping[str, Any], *, is_v3: bool) -> MixtureShape | None:
    """By `mlp_layer_types`, as transformers 5 writes GLM-4.7-Flash's, else behind the first `first_k_dense_replace` layers."""
    kinds, count = config.get("mlp_layer_types"), config["num_hidden_layers"]
    first = {} if kinds is None else {"first_k_dense_replace": 0}  # its default is as many as a model of one layer has
    experts = read_grouped_experts({**config, **first}, scoring="sigmoid" if is_v3 else "softmax")
    if experts is None or kinds is None:
        return experts
    if len(kinds) != count or set(kinds) - {"dense", "sparse"}:
        raise CheckpointError(f"config.json has mlp_layer_types {kinds!r}; it needs 'dense' or 'sparse' for each of {count} layers")
    sparse = frozenset(index for index, kind in enumerate(kinds) if kind == "sparse")
    return dataclasses.replace(experts, layers=sparse) if sparse else None


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    return shape(config).facts()


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_deepseek.model import build_decoder

    return build_decoder(context)


def ignored_weights(config: Mapping[str, Any]) -> list[str]:
    """Of the layers behind the last, which only a drafter asks for; one may be there of which config.json says nothing."""
    return next_layers(config, least=1)


def module_shape(config: Mapping[str, Any]) -> DeepseekShape:
    """Of the layers behind the last."""
    whole = shape(config)
    return dataclasses.replace(whole, decoder=whole.decoder.one_more(num_next_layers(config)))


def build_module(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_deepseek.model import build_module

    return build_module(context)


MTP: Final = next_token_drafter(
    "DeepseekV3ForCausalLM", FLASH, describe=lambda config: module_shape(config).facts(), build=build_module
)
