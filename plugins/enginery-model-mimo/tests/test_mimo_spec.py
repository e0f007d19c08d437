"""What config.json means. Logits and tokens are compared with transformers in tests/parity."""

from __future__ import annotations

import pytest
from transformers import MiMoV2FlashConfig

from enginery.api import CheckpointError
from enginery_model_mimo import register_drafters, register_models
from enginery_model_mimo.spec import describe, shape, value_scale

SIZES = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=7, num_attention_heads=8)
CONFIG = SIZES | {"architectures": ["MiMoV2FlashForCausalLM"], "max_position_embeddings": 64}
HUB = CONFIG | {
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
    "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
    "sliding_window_size": 128,
    "sliding_window": 128,
    "layernorm_epsilon": 1e-5,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 8,
    "num_key_value_heads": 4,
    "swa_head_dim": 192,
    "partial_rotary_factor": 0.334,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "routed_scaling_factor": None,
    "n_shared_experts": None,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


def test_it_is_offered() -> None:
    (spec,) = register_models()
    assert spec.architectures == ("MiMoV2FlashForCausalLM",)


def test_layers_with_windows_have_sinks_and_twice_the_kv_heads() -> None:
    layers = describe(CONFIG).layers
    assert [layer.sliding_window for layer in layers] == [None, 129, 129, 129, 129, None, 129]
    assert [layer.sinks for layer in layers] == [layer.sliding_window is not None for layer in layers]
    assert [layer.num_kv_heads for layer in layers] == [4, 8, 8, 8, 8, 4, 8]
    assert {(layer.head_dim, layer.value_dim) for layer in layers} == {(192, 128)}


def test_the_hubs_spelling_says_the_same() -> None:
    assert shape(HUB) == shape(CONFIG)
    assert (shape(HUB).rope.rotary_dim, shape(HUB).rope.theta) == (64, 5e6)
    assert shape(HUB | {"sliding_window_size": 31}).windows[1] == 32
    assert shape(HUB | {"layernorm_epsilon": 1e-3}).rms_eps == 1e-3


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_angles_that_are_stated_of_one_kind_of_layer_are_the_other_s_too(kind: str) -> None:
    found = shape(CONFIG | {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 3e4}}})
    assert found.window_rope is not None
    assert (found.rope.theta, found.window_rope.theta) == (3e4, 3e4)


def test_what_a_file_leaves_out_is_what_transformers_takes() -> None:
    stated = MiMoV2FlashConfig(**{key: value for key, value in CONFIG.items() if key != "architectures"}).to_dict()
    assert shape(stated | {"architectures": CONFIG["architectures"]}) == shape(CONFIG)
    assert value_scale(stated) == value_scale(CONFIG) == 0.707
    assert value_scale(CONFIG | {"attention_value_scale": None}) == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_act": "gelu"},
        {"layer_types": ["full_attention"]},
        {"moe_layer_freq": [1]},
        {"swa_head_dim": 64},
        {"swa_num_key_value_heads": 3},
        {"n_shared_experts": 1},
        {"scoring_func": "softmax"},
        {"attention_value_scale": "half"},
        {"moe_layer_freq": 1},
    ],
)
def test_what_cannot_be_served_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(CheckpointError):
        describe(CONFIG | wrong)


def test_the_layers_that_predict_further_tokens_are_windowed_and_dense() -> None:
    """Three, of which the hub's config.json says nothing; 0 says that there are none."""
    (drafter,) = register_drafters()
    assert drafter.model is not None
    assert drafter.modules is not None
    assert drafter.suits is not None
    facts = drafter.model.describe(HUB)
    assert [(layer.sliding_window, layer.num_kv_heads, layer.sinks) for layer in facts.layers] == [(129, 8, True)] * 3
    assert drafter.modules(HUB | {"num_nextn_predict_layers": 1}) == 1
    assert drafter.suits(HUB)
    assert not drafter.suits(HUB | {"num_nextn_predict_layers": 0})
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers"):
        drafter.modules(HUB | {"num_nextn_predict_layers": "three"})
