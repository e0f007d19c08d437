"""What config.json of Ling-3.0 means. Logits and tokens are compared with transformers in tests/parity."""

from __future__ import annotations

import pytest

from enginery.api import CheckpointError
from enginery_model_bailing.spec.ling3 import shape

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


def test_ling_has_latents_in_the_last_layer_of_each_group_and_a_floor_of_its_decay() -> None:
    ling = shape(LING)
    assert ling.linear == (True, True, True, False) * 6
    assert (ling.rule.gate_floor, ling.rule.key_dim, ling.q_rank) == (-5.0, 128, 256)
    assert (ling.decoder.rope.rotary_dim, ling.decoder.experts.num_experts) == (64, 128)
    assert shape(LING | {"kda_safe_gate": False}).rule.gate_floor is None
    assert shape(LING | {"num_hidden_layers": 6}).linear == (True, True, True, False, False, False)
    kinds = ["full_attention", *["linear_attention"] * 23]
    assert shape(LING | {"layer_types": kinds}).linear == (False, *[True] * 23)


@pytest.mark.parametrize(
    "changed",
    [
        {"no_kda_lora": False},
        {"use_mla_nope": True},
        {"gated_attention_proj_granularity_type": "element_wise"},
        {"num_key_value_heads": 8},
        {"expert_swiglu_limit_list": [0, 7.0]},
        {"layer_types": ["linear_attention"]},
        {"routed_scaling_factor": None},
        {"topk_group": None},
        {"kda_lower_bound": None},
        {"mlp_layer_types": ["dense"] * 23 + ["other"]},
    ],
    ids=str,
)
def test_what_is_not_served_of_ling_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(changed))):
        shape(LING | changed)


def test_angles_are_transformers_where_the_file_says_nothing_of_them() -> None:
    assert shape({key: value for key, value in LING.items() if key != "rope_theta"}) == shape(LING)


def test_a_file_must_say_whether_there_are_experts() -> None:
    assert shape(LING | {"num_experts": None}).decoder.experts is None
    with pytest.raises(CheckpointError, match=r"has no 'num_experts', .* or null for dense layers alone"):
        shape({key: value for key, value in LING.items() if key != "num_experts"})
