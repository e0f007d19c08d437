"""What config.json of Ring-2.5 says, without torch."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
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
    latent_softmax_scale,
    next_layers,
    read_decoder_shape,
    read_grouped_experts,
    read_latents,
    required,
    whole_number,
)

NAMES: Final = ExpertNames(correction="gate.expert_bias")
STACKED: Final = NAMES.stacked | {".mlp.gate.e_score_correction_bias": (".mlp.gate.expert_bias",)}  # as some files call it
SERVED: Final[dict[str, Any]] = {
    "linear_silu": False,
    "moe_router_enable_expert_bias": True,
    "rope_interleave": True,
    "score_function": "sigmoid",
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
}


@dataclass(frozen=True, kw_only=True)
class HybridShape(ABC):
    """decoder: what is not attention. linear: by layer, whether it is recurrent; the others have latents.

    scale: of q . k in latent attention. q_rank: None for queries of full rank.
    """

    decoder: DecoderShape
    linear: tuple[bool, ...]
    rule: RecurrentFacts
    latent: LatentFacts
    scale: float
    q_rank: int | None

    @property
    @abstractmethod
    def recurrent_width(self) -> int:
        """How many numbers of a token are there at once in a recurrent layer."""

    def facts(self) -> ModelFacts:
        """The part that the core needs."""
        latent, rule, heads = self.latent, self.rule, self.decoder.num_heads
        row, absorbed = latent.rank + latent.rope_dim, latent.activation_width(heads, self.q_rank)
        full = AttnLayerFacts(num_heads=heads, num_kv_heads=1, head_dim=row, latent=latent)
        linear = AttnLayerFacts(num_heads=heads, num_kv_heads=heads, head_dim=rule.key_dim, recurrent=rule)
        kinds = enumerate(linear if is_linear else full for is_linear in self.linear)
        layers = tuple(dataclasses.replace(layer, decoder_layer=index) for index, layer in kinds)
        return self.decoder.facts(layers, width=max(absorbed, self.recurrent_width))


@dataclass(frozen=True, kw_only=True)
class RingShape(HybridShape):
    """num_groups: of the norm of a recurrent layer's output."""

    num_groups: int

    @property
    def recurrent_width(self) -> int:
        """Queries, keys and values count, and as much again for what is made of them."""
        return 4 * self.rule.mixed_width

    def log_decay(self, layer: int) -> tuple[float, ...]:
        """Of each head: minus its slope as in ALiBi (arXiv:2108.12409), less steep in later layers; the first is counted as -1."""
        heads = self.decoder.num_heads
        factor = 1 - (layer - 1) / (len(self.linear) - 1) + 1e-5
        return tuple(-(2.0 ** (-8 * (head + 1) / heads)) * factor for head in range(heads))


def check_served(config: Mapping[str, Any], served: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` for a key that has another value."""
    for key, value in served.items():
        if config.get(key, value) != value:
            raise CheckpointError(f"config.json has {key} {config[key]!r}; this architecture is served with {value!r} only")


def num_experts(config: Mapping[str, Any]) -> object:
    """None: all layers are dense. Raises `CheckpointError` for a file that does not say."""
    return required(config, "num_experts", null="dense layers alone")


def shape(config: Mapping[str, Any]) -> RingShape:
    """Ring-2.5's shape. Raises `CheckpointError` for what is not served."""
    check_served(config, SERVED)
    latent = read_latents(config)
    renamed = {"n_routed_experts": num_experts(config), "n_shared_experts": config.get("num_shared_experts")}
    experts = read_grouped_experts({**config, **renamed}, scoring="sigmoid")
    plain = read_decoder_shape(config, experts=None if experts is None else dataclasses.replace(experts, names=NAMES))
    heads, count, dim = plain.num_heads, len(plain.windows), plain.head_dim
    if heads & (heads - 1) or plain.num_kv_heads != heads:
        raise CheckpointError(
            f"config.json has num_attention_heads {heads} and num_key_value_heads {plain.num_kv_heads}; this architecture is "
            "served with as many, a power of 2"
        )
    if plain.rope.rotary_dim != latent.rope_dim:
        raise CheckpointError(
            f"config.json has partial_rotary_factor for {plain.rope.rotary_dim} dims and qk_rope_head_dim {latent.rope_dim}; "
            "the two kinds of layers share one table, so they must be equal"
        )
    every, num_groups = whole_number(config, "layer_group_size"), whole_number(config, "group_norm_size", 1)
    if heads * dim % num_groups:
        raise CheckpointError(f"config.json has group_norm_size {num_groups}, which does not divide {heads} heads of {dim} dims")
    return RingShape(
        decoder=dataclasses.replace(plain, embedding="word_embeddings"),
        linear=tuple((index + 1) % every > 0 and index < count // every * every for index in range(count)),
        rule=RecurrentFacts(rule="linear", decay="constant", key_heads=heads, value_heads=heads, key_dim=dim, value_dim=dim),
        latent=latent,
        scale=latent_softmax_scale(latent.nope_dim + latent.rope_dim, plain.rope),
        q_rank=whole_number(config, "q_lora_rank") if config.get("q_lora_rank") else None,
        num_groups=num_groups,
    )


def ignored_weights(config: Mapping[str, Any]) -> list[str]:
    """Of layers that predict further tokens, which files have behind the last or apart."""
    return ["model.mtp.*", *next_layers(config)]


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    return shape(config).facts()


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_bailing.ring_model import build_decoder

    return build_decoder(context)
