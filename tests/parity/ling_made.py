"""Ling 1 and 2.0, which transformers does not have, out of models of transformers that compute the same.

Ling 2.0 is GLM-4.5 with q, k and v in one piece and other names. Ling 1 is Qwen2-MoE whose shared expert's gate is zero: this
halves what the expert gives, so it is stored in half here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from parity.oracle import Oracle, expert_shape, grouped_expert_shape, shape
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, PretrainedConfig, Qwen2MoeConfig

EPS = 1e-3  # so large that another one shows
HALF_ROTARY = dict(rope_type="default", rope_theta=600000.0, partial_rotary_factor=0.5)
YARN = HALF_ROTARY | dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
SECOND = shape(head_dim=16, rope_parameters=HALF_ROTARY, rms_norm_eps=EPS, use_qk_norm=True) | grouped_expert_shape()
FIRST = shape(num_experts=8, shared_expert_intermediate_size=64, norm_topk_prob=True, rms_norm_eps=EPS) | expert_shape()
LINGS: dict[str, PretrainedConfig] = {
    "ling": Qwen2MoeConfig(**FIRST, qkv_bias=False),
    "ling-2": Glm4MoeConfig(**SECOND),
    "ling-2-yarn": Glm4MoeConfig(**SECOND | {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN}),
}
NAMES = {
    r"\.embed_tokens\.": ".word_embeddings.",
    r"\.self_attn\.o_proj\.": ".attention.dense.",
    r"\.self_attn\.q_norm\.": ".attention.query_layernorm.",
    r"\.self_attn\.k_norm\.": ".attention.key_layernorm.",
    r"\.mlp\.gate\.e_score_correction_bias$": ".mlp.gate.expert_bias",
    r"\.shared_expert\.": ".shared_experts.",
}
BOTH = (
    *("head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "moe_intermediate_size"),
    *("num_attention_heads", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"),
    *("tie_word_embeddings", "vocab_size", "norm_topk_prob", "bos_token_id", "eos_token_id", "pad_token_id"),
)


def hub_config(config: PretrainedConfig) -> dict[str, Any]:
    """As Ling's repositories state it."""
    stated = config.to_dict()
    rope = stated["rope_parameters"]
    both = {key: stated[key] for key in BOTH if key in stated}
    scaling = {key: rope[key] for key in ("factor", "original_max_position_embeddings") if key in rope}
    both |= {
        "model_type": "bailing_moe",
        "dtype": "float32",
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": rope["rope_type"], **scaling} if scaling else None,
        "use_bias": False,
    }
    if isinstance(config, Qwen2MoeConfig):
        shared = stated["shared_expert_intermediate_size"] // stated["moe_intermediate_size"]
        own = {"architectures": ["BailingMoeForCausalLM"], "num_experts": stated["num_experts"], "num_shared_experts": shared}
        return both | own | {"first_k_dense_replace": 0, "norm_head": False, "norm_softmax": False, "use_qkv_bias": False}
    return both | {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "first_k_dense_replace": stated["first_k_dense_replace"],
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": stated["moe_intermediate_size"],
        "n_group": stated["n_group"],
        "num_experts": stated["n_routed_experts"],
        "num_shared_experts": stated["n_shared_experts"],
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "routed_scaling_factor": stated["routed_scaling_factor"],
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "topk_group": stated["topk_group"],
        "use_qk_norm": True,
        "use_qkv_bias": stated["attention_bias"],
    }


def hub_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names of Ling's files."""
    found = {}
    for name, each in tensors.items():
        if "shared_expert_gate" in name or ".self_attn.k_proj." in name or ".self_attn.v_proj." in name:
            continue
        if ".self_attn.q_proj." in name:
            parts = [tensors[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            found[name.replace(".self_attn.q_proj.", ".attention.query_key_value.")] = torch.cat(parts)
            continue
        own = name
        for pattern, to in NAMES.items():
            own = re.sub(pattern, to, own)
        found[own] = each / 2 if ".shared_expert.down_proj." in name else each
    return found


def write_ling(oracle: Oracle, folder: Path) -> Oracle:
    """The oracle, whose folder has Ling's files."""
    with torch.no_grad():
        for name, parameter in oracle.model.named_parameters():
            if "shared_expert_gate" in name:
                parameter.zero_()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hub_tensors(load_file(oracle.folder / "model.safetensors")), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hub_config(oracle.model.config)))
    return Oracle(folder, oracle.model)
