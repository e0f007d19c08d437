"""What config.json means. Logits and tokens are compared with transformers in tests/parity."""

from __future__ import annotations

import fnmatch

import pytest
from transformers import LongcatFlashConfig

from enginery.api import CheckpointError
from enginery_model_longcat import register_models
from enginery_model_longcat.spec import DEFAULTS, describe, shape

HUB = dict(  # the keys of LongCat-Flash-Chat's config.json that are read or refused
    architectures=["LongcatFlashForCausalLM"],
    attention_bias=False,
    attention_method="MLA",
    expert_ffn_hidden_size=2048,
    ffn_hidden_size=12288,
    hidden_size=6144,
    kv_lora_rank=512,
    max_position_embeddings=131072,
    mla_scale_kv_lora=True,
    mla_scale_q_lora=True,
    moe_topk=12,
    n_routed_experts=512,
    num_attention_heads=64,
    num_layers=28,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=10000000.0,
    routed_scaling_factor=6,
    v_head_dim=128,
    vocab_size=131072,
    zero_expert_num=256,
    zero_expert_type="identity",
)
ROPE5 = {"rope_type": "default", "rope_theta": 1e7}


def test_it_is_offered() -> None:
    assert [spec.architectures for spec in register_models()] == [("LongcatFlashForCausalLM",)]


def test_a_decoder_layer_has_two_layers_with_memory() -> None:
    facts = describe(HUB)
    assert (len(facts.layers), facts.num_decoder_layers) == (56, 28)
    assert [layer.decoder_layer for layer in facts.layers[:5]] == [0, 0, 1, 1, 2]
    assert {layer.head_dim for layer in facts.layers} == {512 + 64}


def test_scales_of_low_ranks_and_the_router_of_all_experts() -> None:
    longcat = shape(HUB)
    assert longcat.scale == pytest.approx(192**-0.5 * 2)  # sqrt(6144 / 1536)
    assert longcat.latent_scale == pytest.approx(12**0.5)
    assert (longcat.num_experts, longcat.mixture.num_experts, longcat.mixture.routing.scale) == (512, 768, 6.0)
    assert not longcat.mixture.routing.renormalise


def test_what_transformers_5_writes_means_the_same() -> None:
    theirs = {key: value for key, value in HUB.items() if key not in ("rope_theta", "attention_method", "zero_expert_type")}
    theirs |= {"rope_parameters": ROPE5, "head_dim": 64, "qk_head_dim": 192, "num_key_value_heads": 64}
    assert shape(theirs) == shape(HUB)


def test_what_a_file_leaves_out_is_as_transformers_has_it_by_default() -> None:
    stated = LongcatFlashConfig().to_dict()
    assert {key: stated[key] for key in DEFAULTS.keys() - {"rope_theta"}} == {
        key: value for key, value in DEFAULTS.items() if key != "rope_theta"
    }
    assert stated["rope_parameters"]["rope_theta"] == DEFAULTS["rope_theta"]
    assert shape({"architectures": HUB["architectures"]}) == shape(HUB)


def test_yarn_scales_the_products_of_queries_and_keys() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0, "original_max_position_embeddings": 64}
    assert shape(HUB | {"rope_parameters": yarn}).scale == shape(HUB).scale
    assert shape(HUB | {"rope_parameters": yarn | {"mscale_all_dim": 1.0}}).scale > shape(HUB).scale


def test_a_model_may_have_no_zero_experts() -> None:
    assert shape(HUB | {"zero_expert_num": 0}).mixture.num_experts == shape(HUB | {"zero_expert_num": None}).num_experts == 512


@pytest.mark.parametrize(
    "changed",
    [
        {"zero_expert_type": "drop"},
        {"mla_scale_q_lora": False},
        {"mla_scale_kv_lora": False},
        {"router_bias": True},
        {"norm_topk_prob": True},
        {"attention_method": "GQA"},
        {"hidden_act": "gelu"},
        {"num_key_value_heads": 8},
        {"qk_head_dim": 128},
        {"q_lora_rank": None},
        {"partial_rotary_factor": 0.5},
        {"moe_topk": 769},
        {"mscale_all_dim": 1.0, "rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1.0}},
        {"routed_scaling_factor": 0},
    ],
    ids=str,
)
def test_what_is_not_served_is_refused(changed: dict[str, object]) -> None:
    said = {"moe_topk": "experts per token"}.get(key := next(iter(changed)), key)
    with pytest.raises(CheckpointError, match=said):
        shape(HUB | changed)


def test_weights_that_nobody_needs_hide_no_expert_that_is_not_counted() -> None:
    (spec,) = register_models()

    def is_ignored(name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in spec.ignored_weights)

    assert is_ignored("model.mtp.layers.0.eh_proj.weight")
    assert is_ignored("model.layers.3.mlp.experts.512.gate_proj.weight")
    assert not is_ignored("model.layers.3.mlp.experts.512.down_proj.weight")
    assert not is_ignored("model.layers.3.mlps.0.gate_proj.weight")
