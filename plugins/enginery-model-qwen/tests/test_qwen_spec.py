"""What config.json means. Logits and tokens are compared with transformers in tests/parity."""

from __future__ import annotations

import pytest

from enginery.api import CheckpointError, Routing
from enginery_model_qwen import register_drafters, register_models
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


EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True)
QWEN2_MOE = CONFIG | EXPERTS | {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 20}
QWEN3_MOE = CONFIG | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"]}


def test_all_are_offered_dense_and_with_experts() -> None:
    offered = {name for spec in register_models() for name in spec.architectures}
    kinds = ("2", "2Moe", "3", "3Moe", "3Next", "3_5", "3_5Moe")
    with_images = {"Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}
    assert offered == {f"Qwen{kind}ForCausalLM" for kind in kinds} | with_images


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
    with pytest.raises(CheckpointError, match="sliding_window -1"):
        shape(on | {"sliding_window": -1})


def test_a_window_that_is_null_is_none_and_one_that_is_left_out_is_of_4096_tokens() -> None:
    """Though it is switched on; `max_window_layers` null counts as left out."""
    on = CONFIG | {"use_sliding_window": True, "max_window_layers": 3}
    assert shape(on | {"sliding_window": None}).windows == (None,) * 4
    assert shape(on).windows == (None, None, None, 4096)
    assert shape(on | {"sliding_window": 8, "max_window_layers": None}).windows == (None,) * 4


@pytest.mark.parametrize("config", [CONFIG, QWEN3, QWEN3_MOE, QWEN2_MOE])
def test_a_part_of_each_head_is_rotated_from_qwen3_next_on(config: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        shape(config | {"partial_rotary_factor": 0.5})
    assert shape(HYBRID | {"partial_rotary_factor": 0.5}).rope.rotary_dim == 128


def test_layer_types_override_the_first_window_layer() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = CONFIG | {"sliding_window": 8, "use_sliding_window": True, "layer_types": kinds}
    assert shape(config).windows == (8, None, 8, None)


def test_qwen2_moe_has_a_gated_shared_expert_and_qwen3_moe_none() -> None:
    two, three = shape(QWEN2_MOE), shape(QWEN3_MOE)
    assert two.experts is not None
    assert three.experts is not None
    assert (two.experts.shared_size, two.experts.shared_gate, two.qkv_bias, two.qk_norm) == (20, True, True, False)
    assert (three.experts.shared_size, three.experts.shared_gate, three.qkv_bias, three.qk_norm) == (0, False, False, True)
    assert (three.experts.num_experts, three.experts.inner_size) == (8, 12)
    assert three.experts.routing == Routing(top_k=2, renormalise=True)
    assert three.head_dim == 4  # Qwen3-MoE has no default of its own


def test_the_number_of_experts_is_read_in_both_spellings() -> None:
    renamed = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"} | {"num_local_experts": 8}
    assert shape(renamed) == shape(QWEN3_MOE)
    with pytest.raises(CheckpointError, match="no 'num_experts'"):
        shape({key: value for key, value in QWEN3_MOE.items() if key != "num_experts"})


def test_layers_without_experts_are_every_so_many_and_those_listed() -> None:
    def layers(**changes: object) -> frozenset[int]:
        experts = shape(QWEN3_MOE | changes).experts
        return frozenset() if experts is None else experts.layers

    assert layers() == {0, 1, 2, 3}
    assert layers(mlp_only_layers=[0, 2]) == {1, 3}
    assert layers(decoder_sparse_step=2) == {1, 3}
    assert layers(decoder_sparse_step=2, mlp_only_layers=[1, 3]) == frozenset()
    assert layers(num_experts=0) == frozenset()


def test_windows_beside_experts_are_on_all_layers_or_named() -> None:
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert shape(QWEN3_MOE | {"sliding_window": 8}).windows == (None,) * 4
    assert shape(QWEN3_MOE | on).windows == (8,) * 4
    kinds = ["sliding_attention", "full_attention"] * 2
    assert shape(QWEN2_MOE | on | {"layer_types": kinds}).windows == (8, None, 8, None)
    with pytest.raises(CheckpointError, match="layer_types"):
        shape(QWEN2_MOE | on)


HYBRID = QWEN2_MOE | {
    "architectures": ["Qwen3NextForCausalLM"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
DENSE_35 = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": HYBRID | {"mtp_num_hidden_layers": 1}}


@pytest.mark.parametrize(("name", "count"), [("Qwen3NextForCausalLM", 2), ("Qwen3_5MoeForCausalLM", 2), ("Qwen3_5ForCausalLM", 4)])
def test_kv_heads_that_are_left_out_are_those_of_transformers(name: str, count: int) -> None:
    config = {key: value for key, value in HYBRID.items() if key != "num_key_value_heads"} | {"num_attention_heads": 16}
    assert shape(config | {"architectures": [name]}).num_kv_heads == count


@pytest.mark.parametrize("wrong", [{"linear_num_key_heads": 3}, {"linear_num_value_heads": 1}])
def test_value_heads_that_key_heads_cannot_serve_evenly_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match=r"\d value heads, which is no multiple of its \d key heads, .*; correct config.json"):
        describe(HYBRID | wrong)


@pytest.mark.parametrize("config", [HYBRID, DENSE_35])
def test_the_module_that_drafts_has_one_layer_of_attention(config: dict[str, object]) -> None:
    """Whatever the model's own layers are."""
    (mtp,) = register_drafters()
    assert mtp.suits is not None
    assert mtp.model is not None
    assert mtp.suits(config)
    assert describe(config).has_states
    (layer,) = mtp.model.describe(config).layers
    assert (layer.recurrent, layer.num_kv_heads, layer.head_dim) == (None, 2, 256)


def test_a_model_without_a_module_does_not_draft_and_one_with_several_is_a_chain() -> None:
    (mtp,) = register_drafters()
    assert mtp.suits is not None
    assert mtp.model is not None
    assert mtp.modules is not None
    assert not mtp.suits(HYBRID | {"mtp_num_hidden_layers": 0})
    assert mtp.modules(HYBRID | {"num_nextn_predict_layers": 2}) == 2
    assert len(mtp.model.describe(HYBRID | {"num_nextn_predict_layers": 2}).layers) == 2


@pytest.mark.parametrize("config", [CONFIG, QWEN3, QWEN2_MOE, QWEN3_MOE])
def test_contexts_end_where_dual_chunk_attention_would_begin(config: dict[str, object]) -> None:
    chunks = {"chunk_size": 48, "local_size": 8, "original_max_position_embeddings": 48}
    assert describe(config | {"dual_chunk_attention_config": chunks}).max_positions == 48
    assert describe(config | {"dual_chunk_attention_config": None}).max_positions == 64
