"""Models of recurrent and softmax layers equal transformers: logits, and greedy tokens however the work is cut up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pairwise import EVERYTHING, in_turn
from parity.engine_driver import assert_cut_up, assert_last_logits, rounding_error
from parity.oracle import LATENT_YARN, Oracle, shape
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    KimiLinearConfig,
    MiniMaxConfig,
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from enginery.plugin.registry import Registry

DELTA = dict(
    head_dim=32,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=16,
    linear_value_head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
)
SOME_EXPERTS = dict(moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=8, num_experts_per_tok=2)
LING_3 = shape(
    num_key_value_heads=4,
    head_dim=12,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=10,
    n_group=4,
    topk_group=2,
    moe_intermediate_size=32,
    num_local_experts=8,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    layer_group_size=4,
    num_mtp_layers=0,
)
HYBRIDS: dict[str, PretrainedConfig] = {
    "qwen3_5": Qwen3_5TextConfig(**shape(**DELTA)),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**shape(**DELTA, **SOME_EXPERTS)),
    "kimi_linear": KimiLinearConfig(
        **shape(
            num_key_value_heads=4,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
            moe_intermediate_size=32,
            num_local_experts=8,
            num_experts_per_tok=2,
            linear_head_dim=16,
            linear_num_heads=4,
            layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        )
    ),
    "minimax": MiniMaxConfig(
        **shape(
            head_dim=16,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            block_size=16,
            full_attn_alpha_factor=3.5,
            linear_attn_alpha_factor=2.5,
            linear_attn_beta_factor=0.75,
            mlp_alpha_factor=1.5,
            layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        )
    ),
    "qwen3_next": Qwen3NextConfig(**shape(**DELTA, **SOME_EXPERTS)),
}
if "bailing_hybrid" in CONFIG_MAPPING:  # the transformers of a machine with a GPU may be older
    HYBRIDS["ling_3"] = CONFIG_MAPPING["bailing_hybrid"](**LING_3)


@pytest.fixture(params=sorted(HYBRIDS))
def oracle(request: pytest.FixtureRequest, write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle(request.param, HYBRIDS[request.param])


def test_logits_after_a_prompt_are_transformers(oracle: Oracle, registry: Registry) -> None:
    assert_last_logits(oracle, registry, oracle.prompts[:3])


CUTS: list[dict[str, object]] = [
    {},
    {"max_batch_tokens": 7},
    {"page_size": 1},
    {"max_batch_requests": 2},
    {"num_pages": 12, "page_size": 16},
    {"overlap": True},
]
# On a CPU several at once: the plain one is a part of every other test.
TOGETHER: list[dict[str, object]] = [
    {"num_pages": 150, "max_batch_tokens": 7, "page_size": 1, "overlap": True},
    {"num_pages": 12, "page_size": 16, "max_batch_requests": 3},
]


@in_turn(("oracle", sorted(HYBRIDS)), ("changes", CUTS if EVERYTHING else TOGETHER), indirect=["oracle"])
def test_greedy_tokens_are_transformers_however_the_work_is_cut_up(
    oracle: Oracle, registry: Registry, changes: dict[str, object]
) -> None:
    assert_cut_up(oracle, registry, changes)


def test_half_precision_stays_close(oracle: Oracle, registry: Registry) -> None:
    assert rounding_error(oracle, registry) < 0.06


def test_kimi_is_read_in_the_hubs_layout(write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path) -> None:
    """The dense layer is `mlp` there, and lists of layers begin with 1."""
    oracle = write_oracle("kimi_linear", HYBRIDS["kimi_linear"])
    weights = load_file(oracle.folder / "model.safetensors")
    misnamed = "model.layers.0.block_sparse_moe."
    assert any(name.startswith(misnamed) for name in weights)
    save_file(
        {name.replace(misnamed, "model.layers.0.mlp."): tensor for name, tensor in weights.items()}, tmp_path / "model.safetensors"
    )
    config = json.loads((oracle.folder / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"):
        del config[key]
    lists = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4}
    config |= {"linear_attn_config": lists, "first_k_dense_replace": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_last_logits(oracle, registry, oracle.prompts[1:2], model=str(tmp_path))


def test_ling_is_read_in_the_hubs_layout(write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path) -> None:
    """Delta attention ends with `o_proj` there; kinds of layers are not listed, and a factor is of more than what is rotated."""
    oracle = write_oracle("ling_3", HYBRIDS["ling_3"])
    weights = load_file(oracle.folder / "model.safetensors")
    delta = ["model.layers.0.attention.", "model.layers.1.attention.", "model.layers.2.attention."]
    renamed = {f"{at}dense.weight": f"{at}o_proj.weight" for at in delta}
    weights = {renamed.get(name, name): tensor for name, tensor in weights.items()}
    save_file(weights | {"model.layers.4.eh_proj.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    stated = json.loads((oracle.folder / "config.json").read_text())
    ours = ("architectures", "layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    names = {"model_max_length": "max_position_embeddings", "num_expert_group": "n_group", "moe_renormalize": "norm_topk_prob"}
    names |= {"num_experts_per_token": "num_experts_per_tok"}
    config = {names.get(key, key): value for key, value in stated.items() if key not in ours}
    config |= {"architectures": ["BailingMoeV3ForCausalLM"], "head_dim": 12, "partial_rotary_factor": 0.5}
    config |= {"num_nextn_predict_layers": 1, "moe_shared_expert_intermediate_size": 32, "expert_swiglu_limit_list": [0] * 4}
    config["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_last_logits(oracle, registry, oracle.prompts[1:2], model=str(tmp_path))


def test_latents_of_ling_are_scaled_with_yarn(write_oracle: Callable[..., Oracle], registry: Registry) -> None:
    oracle = write_oracle("ling_3_yarn", type(HYBRIDS["ling_3"])(**LING_3 | {"rope_parameters": LATENT_YARN}))
    assert_last_logits(oracle, registry, oracle.prompts[1:2], atol=1e-5)


class LowRank(torch.nn.Module):
    """Queries of low rank, by the names of the files."""

    def __init__(self, hidden: int, rank: int, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        down, up = (torch.randn(*sizes, generator=generator) / sizes[1] ** 0.5 for sizes in ((rank, hidden), (width, rank)))
        norm = 1 + 0.1 * torch.randn(rank, generator=generator)
        self.weights = {"q_a_proj.weight": down, "q_a_layernorm.weight": norm, "q_b_proj.weight": up}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down, norm, up = self.weights.values()
        return torch.nn.functional.rms_norm(x @ down.T, norm.shape, norm, 1e-6) @ up.T


def test_ling_has_queries_of_low_rank(write_oracle: Callable[..., Oracle], registry: Registry) -> None:
    """As Ling-3.0-tiny's, which transformers' class does not have: here its product of queries is another module."""
    oracle = write_oracle("ling_3_low_rank", type(HYBRIDS["ling_3"])(**LING_3))
    file, low = oracle.folder / "model.safetensors", LowRank(64, 20, 4 * (16 + 8))
    weights = load_file(file)
    del weights["model.layers.3.attention.q_proj.weight"]
    save_file(weights | {f"model.layers.3.attention.{name}": each for name, each in low.weights.items()}, file)
    oracle.model.model.layers[3].self_attn.q_proj = low
    config = json.loads((oracle.folder / "config.json").read_text())
    (oracle.folder / "config.json").write_text(json.dumps(config | {"q_lora_rank": 20}))
    assert_last_logits(oracle, registry, oracle.prompts[1:2])


@pytest.mark.parametrize("is_text_alone", [False, True])
def test_qwen3_5_is_read_beside_a_model_for_images(
    write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path, is_text_alone: bool
) -> None:
    """As the hub has it: a config in `text_config`, longer names, which texts alone may have, and tensors that nobody asks for."""
    oracle = write_oracle("qwen3_5", HYBRIDS["qwen3_5"])
    weights = load_file(oracle.folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights.items()}
    extra = {"model.visual.patch_embed.proj.weight": torch.zeros(4, 4), "mtp.fc.weight": torch.zeros(4, 4)}
    save_file(renamed | extra, tmp_path / "model.safetensors")
    text = json.loads((oracle.folder / "config.json").read_text())
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(text if is_text_alone else config))
    assert_last_logits(oracle, registry, oracle.prompts[1:2], model=str(tmp_path))
