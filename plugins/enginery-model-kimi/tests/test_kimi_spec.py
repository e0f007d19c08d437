"""What config.json means. Logits and tokens are compared with transformers in tests/parity."""

from __future__ import annotations

import pytest

from enginery.api import CheckpointError
from enginery_model_kimi import register_models
from enginery_model_kimi.spec import describe, shape

FULL_LAYERS = [4, 8, 12, 16, 20, 24, 27]
HUB = dict(  # Kimi-Linear-48B-A3B's config.json
    architectures=["KimiLinearForCausalLM"],
    first_k_dense_replace=1,
    head_dim=72,
    hidden_act="silu",
    hidden_size=2304,
    intermediate_size=9216,
    kv_lora_rank=512,
    linear_attn_config=dict(
        full_attn_layers=FULL_LAYERS,
        head_dim=128,
        kda_layers=[layer for layer in range(1, 28) if layer not in FULL_LAYERS],
        num_heads=32,
        short_conv_kernel_size=4,
    ),
    mla_use_nope=True,
    model_max_length=1048576,
    moe_intermediate_size=1024,
    moe_layer_freq=1,
    moe_renormalize=True,
    moe_router_activation_func="sigmoid",
    num_attention_heads=32,
    num_expert_group=1,
    num_experts=256,
    num_experts_per_token=8,
    num_hidden_layers=27,
    num_key_value_heads=32,
    num_shared_experts=1,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-05,
    rope_scaling=None,
    rope_theta=10000.0,
    routed_scaling_factor=2.446,
    tie_word_embeddings=False,
    topk_group=1,
    v_head_dim=128,
    vocab_size=163840,
)


def test_it_is_offered() -> None:
    assert [spec.architectures for spec in register_models()] == [("KimiLinearForCausalLM",)]


def test_the_hubs_lists_begin_with_one() -> None:
    facts = describe(HUB)
    assert [index + 1 for index, layer in enumerate(facts.layers) if layer.latent is not None] == FULL_LAYERS
    assert (len(facts.layers), facts.max_positions) == (27, 1048576)
    experts = shape(HUB).decoder.experts
    assert experts is not None
    assert (experts.layers, experts.num_experts, experts.routing.top_k) == (frozenset(range(1, 27)), 256, 8)


def test_layer_types_of_transformers_win_and_its_default_is_another() -> None:
    plain = {key: value for key, value in HUB.items() if key != "linear_attn_config"} | {"num_hidden_layers": 6}
    assert shape(plain).linear == (True, True, True, True, False, True)
    kinds = ["full_attention", *["linear_attention"] * 5]
    assert shape(plain | {"layer_types": kinds}).linear == (False, True, True, True, True, True)


@pytest.mark.parametrize(
    "changed",
    [
        {"mla_use_nope": False},
        {"moe_router_activation_func": "softmax"},
        {"num_key_value_heads": 8},
        {"layer_types": ["linear_attention"]},
        {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2]}},
    ],
)
def test_what_is_not_served_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(changed))):
        shape(HUB | changed)


@pytest.mark.parametrize("key", ["linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"])
def test_a_size_that_is_null_is_named(key: str) -> None:
    plain = {name: value for name, value in HUB.items() if name != "linear_attn_config"}
    with pytest.raises(CheckpointError, match=f"has no '{key}'"):
        shape(plain | {key: None})


def test_a_single_layer_may_have_experts() -> None:
    """Files of transformers 5 say so by layer, and nothing of how many are dense, which is one by default."""
    one = {key: value for key, value in HUB.items() if key != "first_k_dense_replace"} | {"num_hidden_layers": 1}
    experts = shape(one | {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]}).decoder.experts
    assert experts is not None
    assert experts.layers == {0}
