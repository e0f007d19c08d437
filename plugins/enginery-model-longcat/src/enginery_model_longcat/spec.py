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
    MixtureShape,
    Model,
    ModelContext,
    ModelFacts,
    Routing,
    check_served,
    latent_softmax_scale,
    read_decoder_shape,
    read_latents,
    whole_number,
)

NAMES: Final = ExpertNames(router="router.classifier", correction="router.e_score_correction_bias")
# For files that leave them out: the defaults of transformers' LongcatFlashConfig.
DEFAULTS: Final[dict[str, Any]] = {
    "attention_bias": False,
    "expert_ffn_hidden_size": 2048,
    "ffn_hidden_size": 12288,
    "hidden_size": 6144,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "moe_topk": 12,
    "n_routed_experts": 512,
    "num_attention_heads": 64,
    "num_layers": 28,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e7,
    "routed_scaling_factor": 6.0,
    "v_head_dim": 128,
    "vocab_size": 131072,
    "zero_expert_num": 256,
}
# Keys of the hub's files, of which transformers computes the one value that is in them.
FIXED: Final[dict[str, Any]] = {
    "attention_method": "MLA",
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "norm_topk_prob": False,
    "router_bias": False,
    "zero_expert_type": "identity",
}


@dataclass(frozen=True, kw_only=True)
class LongcatShape:
    """decoder: what is not attention; its `experts` count the zero experts, which are behind the `num_experts` with weights.

    q_rank: `q_lora_rank`. scale: of q . k, with that of queries of low rank in it. latent_scale: of the normed latents. bias: of
    the projections down and out.
    """

    decoder: DecoderShape
    mixture: MixtureShape
    num_experts: int
    latent: LatentFacts
    q_rank: int
    scale: float
    latent_scale: float
    bias: bool

    def facts(self) -> ModelFacts:
        """Each decoder layer has two layers with memory. Alive besides the usual: a mixture's output, and zero experts' part."""
        latent, heads = self.latent, self.decoder.num_heads
        layer = AttnLayerFacts(num_heads=heads, num_kv_heads=1, head_dim=latent.rank + latent.rope_dim, latent=latent)
        layers = tuple(dataclasses.replace(layer, decoder_layer=index // 2) for index in range(2 * len(self.decoder.windows)))
        facts = self.decoder.facts(layers, width=latent.activation_width(heads, self.q_rank))
        return dataclasses.replace(facts, activation_width=facts.activation_width + 2 * facts.hidden_size)


def shape(config: Mapping[str, Any]) -> LongcatShape:
    """LongCat-Flash's shape. Raises `CheckpointError` for what is not served."""
    for key, served in FIXED.items():
        check_served(config, key, (served,))
    config = {**DEFAULTS, **config}
    latent = read_latents(config)
    head_dim, mixture = latent.nope_dim + latent.rope_dim, _mixture(config)
    hidden, q_rank = whole_number(config, "hidden_size"), whole_number(config, "q_lora_rank")
    sizes = {"intermediate_size": config["ffn_hidden_size"], "num_hidden_layers": whole_number(config, "num_layers")}
    decoder = read_decoder_shape({**config, **sizes, "head_dim": latent.rope_dim}, experts=mixture)
    if decoder.num_kv_heads != decoder.num_heads:
        raise CheckpointError("config.json has num_key_value_heads that differ from num_attention_heads; latents serve every head")
    if config.get("qk_head_dim") not in (None, head_dim):
        raise CheckpointError(
            f"config.json has qk_head_dim {config['qk_head_dim']!r}, which must be qk_nope_head_dim + qk_rope_head_dim, {head_dim}"
        )
    if decoder.rope.rotary_dim != latent.rope_dim or latent.rope_dim % 2:
        raise CheckpointError(
            f"config.json rotates {decoder.rope.rotary_dim} of qk_rope_head_dim={latent.rope_dim} dims; this architecture rotates "
            "all of them, in pairs: take partial_rotary_factor out of config.json, or correct qk_rope_head_dim"
        )
    return LongcatShape(
        decoder=decoder,
        mixture=mixture,
        num_experts=whole_number(config, "n_routed_experts"),
        latent=latent,
        q_rank=q_rank,
        scale=latent_softmax_scale(head_dim, decoder.rope) * math.sqrt(hidden / q_rank),
        latent_scale=math.sqrt(hidden / latent.rank),
        bias=bool(config["attention_bias"]),
    )


def _mixture(config: Mapping[str, Any]) -> MixtureShape:
    """Of every layer. Its router chooses among the experts with weights and, behind them, those without."""
    scale = config["routed_scaling_factor"]
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not scale > 0:
        raise CheckpointError(
            f"config.json has routed_scaling_factor {scale!r}, which must be a number above 0; the file is damaged"
        )
    return MixtureShape(
        layers=frozenset(range(whole_number(config, "num_layers"))),
        num_experts=whole_number(config, "n_routed_experts") + whole_number(config, "zero_expert_num", 0),
        inner_size=whole_number(config, "expert_ffn_hidden_size"),
        routing=Routing(top_k=whole_number(config, "moe_topk"), scale=float(scale)),
        correction_bias=True,
        wide_router=True,
        names=NAMES,
    )


def describe(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that the core plans with."""
    return shape(config).facts()


def build(context: ModelContext) -> Model:
    """Import torch and build."""
    from enginery_model_longcat.model import build_decoder

    return build_decoder(context)
