"""What config.json means. Logits and tokens are compared with the vendor's in tests/parity."""

from __future__ import annotations

import pytest

from enginery.api import CheckpointError
from enginery_model_bailing import register_models
from enginery_model_bailing.spec import ling as ling_spec
from enginery_model_bailing.spec.ring import describe, ignored_weights, shape

RING = dict(
    architectures=["BailingMoeV2_5ForCausalLM"],
    first_k_dense_replace=1,
    group_norm_size=2,
    head_dim=16,
    hidden_act="silu",
    hidden_size=64,
    intermediate_size=128,
    kv_lora_rank=32,
    layer_group_size=4,
    linear_silu=False,
    max_position_embeddings=512,
    model_type="bailing_hybrid",
    moe_intermediate_size=32,
    n_group=4,
    num_attention_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
    num_hidden_layers=4,
    num_key_value_heads=4,
    num_shared_experts=1,
    partial_rotary_factor=0.5,
    q_lora_rank=48,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    rope_theta=600000.0,
    routed_scaling_factor=2.5,
    topk_group=2,
    v_head_dim=16,
    vocab_size=256,
)


LING = dict(  # Ling-3.0-tiny's config.json
    architectures=["BailingMoeV3ForCausalLM"],
    first_k_dense_replace=1,
    gated_attention_proj_granularity_type="head_wise",
    head_dim=128,
    hidden_size=1536,
    intermediate_size=4608,
    kda_lower_bound=-5,
    kda_safe_gate=True,
    kv_lora_rank=512,
    layer_group_size=4,
    max_position_embeddings=131072,
    model_type="bailing_hybrid",
    moe_intermediate_size=512,
    moe_shared_expert_intermediate_size=512,
    n_group=8,
    no_kda_lora=True,
    num_attention_heads=16,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=24,
    num_key_value_heads=16,
    num_shared_experts=1,
    q_lora_rank=256,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rope_theta=6000000,
    routed_scaling_factor=2.5,
    topk_group=4,
    v_head_dim=128,
    vocab_size=157184,
)


def test_they_are_told_apart_by_their_architectures() -> None:
    ring, ling = register_models()
    assert ring.architectures == ("BailingMoeV2_5ForCausalLM",)
    assert ling.architectures == ("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM")


def test_ling_has_latents_in_the_last_layer_of_each_group_and_a_floor_of_its_decay() -> None:
    ling = ling_spec.shape(LING)
    assert ling.linear == (True, True, True, False) * 6
    assert (ling.rule.gate_floor, ling.rule.key_dim, ling.q_rank) == (-5.0, 128, 256)
    assert (ling.decoder.rope.rotary_dim, ling.decoder.experts.num_experts) == (64, 128)
    assert ling_spec.shape(LING | {"kda_safe_gate": False}).rule.gate_floor is None
    assert ling_spec.shape(LING | {"num_hidden_layers": 6}).linear == (True, True, True, False, False, False)
    kinds = ["full_attention", *["linear_attention"] * 23]
    assert ling_spec.shape(LING | {"layer_types": kinds}).linear == (False, *[True] * 23)


@pytest.mark.parametrize(
    "changed",
    [
        {"no_kda_lora": False},
        {"use_mla_nope": True},
        {"gated_attention_proj_granularity_type": "element_wise"},
        {"num_key_value_heads": 8},
        {"expert_swiglu_limit_list": [0, 7.0]},
        {"layer_types": ["linear_attention"]},
        {"mlp_layer_types": ["dense"] * 23 + ["other"]},
    ],
    ids=str,
)
def test_what_is_not_served_of_ling_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(changed))):
        ling_spec.shape(LING | changed)


def test_the_last_layer_of_each_group_and_those_behind_have_latents() -> None:
    assert [layer.latent is not None for layer in describe(RING | {"num_hidden_layers": 6}).layers] == [False] * 3 + [True] * 3


def test_slopes_are_the_vendors() -> None:
    ring = shape(RING)
    assert ring.log_decay(0) == pytest.approx([-0.33334, -0.08333, -0.02083, -0.00521], abs=1e-5)
    assert ring.log_decay(2) == pytest.approx([-0.16667, -0.04167, -0.01042, -0.0026], abs=1e-5)


@pytest.mark.parametrize(
    "changed", [{"linear_silu": True}, {"num_key_value_heads": 2}, {"partial_rotary_factor": 1.0}, {"group_norm_size": 3}]
)
def test_what_is_not_served_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(changed))):
        shape(RING | changed)


def test_layers_that_predict_further_tokens_are_ignored() -> None:
    assert ignored_weights(RING) == ["model.mtp.*"]
    assert ignored_weights(RING | {"num_nextn_predict_layers": 1}) == ["model.mtp.*", "model.layers.4.*"]


def test_the_bias_of_the_router_is_known_by_both_names() -> None:
    for spec in register_models():
        assert spec.stacked_weights[".mlp.gate.e_score_correction_bias"] == (".mlp.gate.expert_bias",)
