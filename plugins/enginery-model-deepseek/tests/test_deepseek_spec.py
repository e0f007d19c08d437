"""What config.json means. Logits and tokens are compared with transformers in tests/parity."""

from __future__ import annotations

import math

import pytest

from enginery.api import CheckpointError, LatentFacts
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
LITE = dict(  # DeepSeek-V2-Lite's config.json, with dense layers only
    architectures=["DeepseekV2ForCausalLM"],
    attention_bias=False,
    first_k_dense_replace=27,
    hidden_act="silu",
    hidden_size=2048,
    intermediate_size=10944,
    kv_lora_rank=512,
    max_position_embeddings=163840,
    moe_layer_freq=1,
    n_routed_experts=64,
    n_shared_experts=2,
    num_attention_heads=16,
    num_hidden_layers=27,
    num_key_value_heads=16,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-06,
    rope_scaling=HUB_YARN,
    rope_theta=10000,
    tie_word_embeddings=False,
    v_head_dim=128,
    vocab_size=102400,
)


def test_deepseek_v2_is_offered() -> None:
    assert [spec.architectures for spec in register_models()] == [("DeepseekV2ForCausalLM",)]


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


@pytest.mark.parametrize("experts", [{}, {"n_routed_experts": 0}, {"n_routed_experts": "left out"}])
def test_a_checkpoint_with_experts_is_refused_by_its_first_such_layer(experts: dict[str, object]) -> None:
    config = {key: value for key, value in (LITE | {"first_k_dense_replace": 1} | experts).items() if value != "left out"}
    with pytest.raises(
        CheckpointError, match=r"in layers 1 to 26 .* not served yet; serve a checkpoint whose layers are all dense"
    ):
        describe(config)


def test_layers_are_dense_where_the_number_of_experts_is_null() -> None:
    assert len(describe(LITE | {"first_k_dense_replace": 1, "n_routed_experts": None}).layers) == 27


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kv_lora_rank": None}, "None for 'kv_lora_rank'"),
        ({"v_head_dim": 0}, "0 for 'v_head_dim'"),
        ({"q_lora_rank": "all"}, "'all' for 'q_lora_rank'"),
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
