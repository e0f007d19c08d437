"""What config.json means. Logits and tokens are compared with transformers in tests/parity."""

from __future__ import annotations

from enginery_model_qwen import register_models
from enginery_model_qwen.spec import describe, shape

CONFIG = dict(
    architectures=["Qwen2ForCausalLM"],
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
QWEN3 = CONFIG | {"architectures": ["Qwen3ForCausalLM"]}


def test_qwen2_and_qwen3_are_offered() -> None:
    assert {name for spec in register_models() for name in spec.architectures} == {"Qwen2ForCausalLM", "Qwen3ForCausalLM"}


def test_qwen2_has_biases_and_qwen3_has_head_norms() -> None:
    two, three = shape(CONFIG), shape(QWEN3)
    assert (two.qkv_bias, two.out_bias, two.qk_norm, two.head_dim) == (True, False, False, 4)
    assert (three.qkv_bias, three.out_bias, three.qk_norm, three.head_dim) == (False, False, True, 128)
    assert shape(QWEN3 | {"attention_bias": True, "head_dim": 8}).out_bias


def test_the_window_begins_at_a_layer_and_is_off_by_default() -> None:
    assert shape(CONFIG | {"sliding_window": 8, "max_window_layers": 1}).windows == (None,) * 4
    on = CONFIG | {"sliding_window": 8, "use_sliding_window": True}
    assert shape(on | {"max_window_layers": 1}).windows == (None, 8, 8, 8)
    assert [layer.sliding_window for layer in describe(on).layers] == [None] * 4


def test_layer_types_override_the_first_window_layer() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = CONFIG | {"sliding_window": 8, "use_sliding_window": True, "layer_types": kinds}
    assert shape(config).windows == (8, None, 8, None)
