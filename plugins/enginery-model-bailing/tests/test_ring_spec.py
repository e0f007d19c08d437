"""What config.json of Ring-2.5 means. Logits and tokens are compared with the vendor's in tests/parity."""

from __future__ import annotations

import math

import pytest

from enginery.api import CheckpointError
from enginery_model_bailing import register_models
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


def test_each_is_offered_by_its_architecture() -> None:
    names = ("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "BailingMoeV2_5ForCausalLM")
    thirds = ("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM")  # transformers has a name of its own
    assert [spec.architectures for spec in register_models()] == [*((name,) for name in names), thirds]


def test_the_last_layer_of_each_group_and_those_behind_have_latents() -> None:
    assert [layer.latent is not None for layer in describe(RING | {"num_hidden_layers": 6}).layers] == [False] * 3 + [True] * 3


def test_latents_are_scaled_with_yarn() -> None:
    """As the vendor's code has it, and DeepSeek's."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0}
    plain, scaled = shape(RING).scale, shape(RING | {"rope_scaling": yarn}).scale
    assert scaled / plain == pytest.approx((0.1 * math.log(4.0) + 1.0) ** 2)


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
    for spec in register_models()[1:]:
        assert spec.stacked_weights[".mlp.gate.e_score_correction_bias"] == (".mlp.gate.expert_bias",)


def test_a_file_must_say_whether_there_are_experts() -> None:
    assert shape(RING | {"num_experts": None}).decoder.experts is None
    with pytest.raises(CheckpointError, match=r"has no 'num_experts', .* or null for dense layers alone"):
        shape({key: value for key, value in RING.items() if key != "num_experts"})
