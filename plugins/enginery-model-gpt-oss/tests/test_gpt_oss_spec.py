"""What config.json means. Logits and tokens are compared with transformers in tests/parity."""

from __future__ import annotations

import pytest
from transformers import GptOssConfig

from enginery.api import CheckpointError
from enginery_model_gpt_oss import register_models
from enginery_model_gpt_oss.spec import YARN, describe, shape

SIZES = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
CONFIG = SIZES | {"architectures": ["GptOssForCausalLM"], "max_position_embeddings": 64}


def test_it_is_offered() -> None:
    (spec,) = register_models()
    assert spec.architectures == ("GptOssForCausalLM",)


def test_every_other_layer_has_a_window_and_all_have_sinks() -> None:
    layers = describe(CONFIG).layers
    assert [layer.sliding_window for layer in layers] == [128, None, 128]
    assert all(layer.sinks for layer in layers)


def test_the_hubs_spelling_of_its_rope_is_read() -> None:
    hub = CONFIG | {"rope_theta": 150000, "rope_scaling": YARN}
    assert shape(hub).rope == shape(CONFIG | {"rope_parameters": YARN | {"rope_theta": 150000.0}}).rope
    assert shape(hub).rope.parameters["truncate"] is False


def test_what_a_file_leaves_out_is_what_transformers_takes() -> None:
    stated = GptOssConfig(**{key: value for key, value in CONFIG.items() if key != "architectures"}).to_dict()
    assert shape(stated | {"architectures": CONFIG["architectures"]}) == shape(CONFIG)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_act": "gelu"},
        {"layer_types": ["full_attention"]},
        {"swiglu_limit": -1.0},
        {"num_experts_per_tok": 200},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_what_cannot_be_served_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(CheckpointError):
        describe(CONFIG | wrong)
