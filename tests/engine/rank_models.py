"""config.json of small models of every family that several ranks share, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.hybrid_reference import SIZES
from parity import test_gemma, test_gpt_oss, test_hybrids, test_mamba, test_mimo
from parity.ling_made import LINGS, hub_config
from parity.oracle import EXPERT_FAMILIES, FAMILIES
from transformers import PretrainedConfig

HYBRIDS = {
    "hybrid": {**SIZES, "latent_layers": [3], "vocab_size": 250},
    "hybrid, latents first": {**SIZES, "latent_layers": [0], "vocab_size": 250},
}


def stated(config: PretrainedConfig | Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(config, PretrainedConfig):
        return dict(config)
    name = type(config).__name__.removesuffix("Config")
    return {**config.to_dict(), "architectures": [f"{name}ForCausalLM"]}


def served(config: PretrainedConfig) -> dict[str, Any]:
    """Of a text model beside one for images, and of MiniMax-Text-01, the names that the engine knows."""
    own = stated(config)
    return own | {"architectures": [own["architectures"][0].replace("TextFor", "For")]}


RING = dict(  # transformers has no such model
    architectures=["BailingMoeV2_5ForCausalLM"],
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    layer_group_size=4,
    group_norm_size=2,
    partial_rotary_factor=0.5,
    rope_theta=600000.0,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    first_k_dense_replace=1,
    moe_intermediate_size=32,
    num_experts=8,
    num_experts_per_tok=2,
    num_shared_experts=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    max_position_embeddings=512,
    vocab_size=256,
)
RECURRENT = {name: served(config) for name, config in (test_hybrids.HYBRIDS | test_mamba.FAMILIES).items()}
TWO_KEY_HEADS = RECURRENT["qwen3_next"]
for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
    RECURRENT[name] = RECURRENT[name] | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
RECURRENT["bamba_one_group"] = RECURRENT["bamba"] | {"mamba_n_groups": 1}
OTHERS = test_gemma.GEMMAS | {"gpt-oss": test_gpt_oss.CONFIG, "mimo": test_mimo.CONFIG}
CONFIGS = {name: stated(config) for name, config in (FAMILIES | EXPERT_FAMILIES | HYBRIDS).items()} | RECURRENT
CONFIGS |= {name: served(config) for name, config in OTHERS.items()} | {"ring": RING}
CONFIGS |= {name: hub_config(LINGS[name]) for name in ("ling", "ling-2")}
CONFIGS["llama-odd-vocabulary"] = {**CONFIGS["llama"], "vocab_size": 251}
CONFIGS["llama-tied-odd"] = {**CONFIGS["llama-tied"], "vocab_size": 251}
EXPERTS = [  # those with a mixture of experts, of four or more
    *("deepseek-v2-experts", "deepseek-v2-lite-experts", "deepseek-v3", "glm4-moe", "glm4-moe-lite", "gpt-oss", "granite_moe"),
    *("jamba", "kimi_linear", "lfm2_moe", "ling", "ling-2", "ling_3", "longcat-flash", "mimo", "minimax", "minimax-m2", "mixtral"),
    *("nemotron_h_latent", "nemotron_h_moe", "qwen2-moe", "qwen3-moe", "qwen3_5_moe", "qwen3_next", "ring"),
]
LANES = sorted(name for name in CONFIGS if not name.startswith("hybrid"))  # those are no plugin's
