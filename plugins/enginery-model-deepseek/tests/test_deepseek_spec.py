"""What config.json means. Logits and tokens are compared with transformers in tests/parity."""

from __future__ import annotations

import math

import pytest

from enginery.api import CheckpointError, LatentFacts, Routing
from enginery_model_deepseek import register_models
from enginery_model_deepseek.spec import describe, shape

HUB_YARN = dict(
    type="yarn",
    factor=40,
    beta_fast=32,
    beta_slow=1,
    mscale=0.707,
    mscale_all_dim=0.707,
    original_max_position_embeddings=4096,
)
LITE = dict(  # DeepSeek-V2-Lite's config.json
    architectures=["DeepseekV2ForCausalLM"],
    attention_bias=False,
    first_k_dense_replace=1,
    hidden_act="silu",
    hidden_size=2048,
    intermediate_size=10944,
    kv_lora_rank=512,
    max_position_embeddings=163840,
    moe_intermediate_size=1408,
    moe_layer_freq=1,
    n_group=1,
    n_routed_experts=64,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_attention_heads=16,
    num_experts_per_tok=6,
    num_hidden_layers=27,
    num_key_value_heads=16,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-06,
    rope_scaling=HUB_YARN,
    rope_theta=10000,
    routed_scaling_factor=1.0,
    scoring_func="softmax",
    tie_word_embeddings=False,
    topk_group=1,
    topk_method="greedy",
    v_head_dim=128,
    vocab_size=102400,
)


V2 = LITE | dict(  # what DeepSeek-V2's has differently, of what matters here
    topk_method="group_limited_greedy", n_group=8, topk_group=3, n_routed_experts=160, routed_scaling_factor=16.0, q_lora_rank=1536
)
V3 = LITE | dict(  # and DeepSeek-V3's
    architectures=["DeepseekV3ForCausalLM"],
    first_k_dense_replace=3,
    moe_intermediate_size=2048,
    n_group=8,
    n_routed_experts=256,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_experts_per_tok=8,
    q_lora_rank=1536,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_group=4,
    topk_method="noaux_tc",
)


FLASH = V3 | dict(  # and GLM-4.7-Flash's
    architectures=["Glm4MoeLiteForCausalLM"],
    first_k_dense_replace=1,
    n_group=1,
    num_hidden_layers=47,
    partial_rotary_factor=1.0,
    rope_scaling=None,
    topk_group=1,
)


def test_deepseek_v2_and_v3_and_flash_are_offered() -> None:
    architectures = [spec.architectures for spec in register_models()]
    assert architectures == [("DeepseekV2ForCausalLM",), ("DeepseekV3ForCausalLM",), ("Glm4MoeLiteForCausalLM",)]


def test_flash_has_v3s_router_and_one_dense_layer() -> None:
    experts = shape(FLASH).decoder.experts
    assert experts is not None
    assert (experts.routing.scoring, experts.correction_bias) == ("sigmoid", True)
    assert experts.layers == frozenset(range(1, 47))


def test_flash_has_experts_where_transformers_5_says_so() -> None:
    kinds = ["dense", "dense", *["sparse"] * 45]
    stated = {key: value for key, value in FLASH.items() if key != "first_k_dense_replace"} | {"mlp_layer_types": kinds}
    experts = shape(stated).decoder.experts
    assert experts is not None
    assert experts.layers == frozenset(range(2, 47))
    with pytest.raises(CheckpointError, match="mlp_layer_types"):
        shape(stated | {"mlp_layer_types": kinds[1:]})
    experts = shape(stated | {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]}).decoder.experts
    assert experts is not None
    assert experts.layers == {0}


def test_routers_are_read_as_the_model_cards_state_them() -> None:
    lite, two, three = (shape(config).decoder.experts for config in (LITE, V2, V3))
    assert lite is not None
    assert two is not None
    assert three is not None
    assert lite.routing == Routing(top_k=6)
    assert two.routing == Routing(top_k=6, num_groups=8, top_groups=3, scale=16.0)
    assert three.routing == Routing(
        top_k=8, scoring="sigmoid", num_groups=8, top_groups=4, group_score="top2", renormalise=True, scale=2.5
    )
    assert (lite.num_experts, lite.inner_size, lite.shared_size, lite.correction_bias) == (64, 1408, 2816, False)
    assert (three.num_experts, three.inner_size, three.shared_size, three.correction_bias) == (256, 2048, 2048, True)
    assert (lite.layers, three.layers) == (frozenset(range(1, 27)), frozenset(range(3, 27)))


def test_keys_that_transformers_does_not_write_are_not_needed() -> None:
    left_out = ("topk_method", "scoring_func", "moe_layer_freq")
    assert shape({key: value for key, value in V3.items() if key not in left_out}) == shape(V3)


def test_the_number_of_experts_has_transformers_default_in_v3_and_flash() -> None:
    for config, counts in ((V3, (256, 8)), (FLASH, (64, 4))):
        left_out = ("n_routed_experts", "num_experts_per_tok")
        experts = shape({key: value for key, value in config.items() if key not in left_out}).decoder.experts
        assert experts is not None
        assert (experts.num_experts, experts.routing.top_k) == counts


def test_v2_must_say_whether_it_has_experts() -> None:
    """Where DeepSeek's code has none for a file that leaves the key out, transformers has 64."""
    with pytest.raises(CheckpointError, match=r"has no 'n_routed_experts', .* or null for dense layers alone"):
        shape({key: value for key, value in LITE.items() if key != "n_routed_experts"})


def test_the_memory_plan_counts_what_experts_keep_alive() -> None:
    few, many = (describe(V3 | {"num_experts_per_tok": count}).activation_width for count in (64, 128))
    assert many - few == 64 * (3 * 2048 + 2048)


def test_memory_has_one_row_of_latents_per_token_and_layer() -> None:
    layers = describe(LITE).layers
    assert len(layers) == 27
    assert {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers} == {(16, 1, 512 + 64)}
    assert layers[0].latent == LatentFacts(rank=512, rope_dim=64, nope_dim=128, value_dim=128)


def test_queries_have_full_rank_where_q_lora_rank_is_null() -> None:
    assert shape(LITE).q_rank is None
    assert shape(LITE | {"q_lora_rank": 1536}).q_rank == 1536
    with pytest.raises(CheckpointError, match="has no 'q_lora_rank'"):
        shape({key: value for key, value in LITE.items() if key != "q_lora_rank"})


def test_the_scale_has_the_square_of_yarns_factor_only_where_mscale_all_dim_is_stated() -> None:
    plain = 1 / math.sqrt(128 + 64)
    factor = 0.1 * 0.707 * math.log(40) + 1
    assert shape(LITE).scale == pytest.approx(plain * factor**2)
    assert shape(LITE | {"rope_scaling": None}).scale == pytest.approx(plain)
    without = {key: value for key, value in HUB_YARN.items() if key != "mscale_all_dim"}
    assert shape(LITE | {"rope_scaling": without}).scale == pytest.approx(plain)
    assert shape(LITE | {"rope_scaling": HUB_YARN | {"factor": 1.0}}).scale == pytest.approx(plain)


def test_both_spellings_of_rope_are_read() -> None:
    new = {key: value for key, value in LITE.items() if key not in ("rope_scaling", "rope_theta")}
    parameters = {key: value for key, value in HUB_YARN.items() if key != "type"}
    new |= {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **parameters}, "head_dim": 64, "qk_head_dim": 192}
    assert shape(new) == shape(LITE)
    assert shape(LITE).decoder.rope.rotary_dim == 64


@pytest.mark.parametrize("dense", [{"n_routed_experts": None}, {"first_k_dense_replace": 27}])
def test_layers_are_dense_where_there_are_no_experts(dense: dict[str, object]) -> None:
    assert shape(LITE | dense).decoder.experts is None


@pytest.mark.parametrize(
    ("config", "wrong", "said"),
    [
        (LITE, {"norm_topk_prob": True}, "norm_topk_prob True"),  # transformers and the file's own code disagree
        (LITE, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        (LITE, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        (LITE, {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (LITE, {"n_routed_experts": 0}, "n_routed_experts 0, which must be"),
        (LITE, {"moe_intermediate_size": None}, "'moe_intermediate_size'"),
        (V2, {"n_group": 7}, "160 experts in 7 groups"),
        (V2, {"topk_group": 9}, "of which 9 are chosen"),
        (V2, {"num_experts_per_tok": 61}, "61 experts per token"),
        (V3, {"n_group": 256}, "of at least 2 experts"),
        (V3, {"topk_method": "greedy"}, "topk_method 'greedy'"),
        (V3, {"rope_interleave": False}, "rope_interleave false"),
    ],
)
def test_a_router_that_cannot_be_served_is_refused(config: dict[str, object], wrong: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        describe(config | wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kv_lora_rank": None}, "no 'kv_lora_rank'"),
        ({"v_head_dim": 0}, "v_head_dim 0"),
        ({"q_lora_rank": "all"}, "q_lora_rank 'all'"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8 and num_attention_heads 16"),
        ({"qk_rope_head_dim": 7}, "rotates 7 of qk_rope_head_dim=7"),
        ({"partial_rotary_factor": 0.5}, "rotates 32 of qk_rope_head_dim=64"),
        ({"rope_scaling": HUB_YARN | {"factor": None}}, "'mscale_all_dim' and without 'factor'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"vocab_size": None}, "has no 'vocab_size'"),
    ],
)
def test_what_cannot_be_served_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        describe(LITE | wrong)
