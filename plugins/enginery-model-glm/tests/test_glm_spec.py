"""What config.json means. Logits and tokens are compared with transformers in tests/parity."""

from __future__ import annotations

import pytest

from enginery.api import CheckpointError, Routing, RowOrder
from enginery_model_glm import register_drafters, register_models
from enginery_model_glm.spec import describe, shape

GLM4 = dict(
    architectures=["Glm4ForCausalLM"],
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
GLM4_MOE = GLM4 | dict(
    architectures=["Glm4MoeForCausalLM"],
    first_k_dense_replace=1,
    moe_intermediate_size=12,
    n_group=1,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    topk_group=1,
)


def test_glm4_and_glm4_moe_are_offered() -> None:
    assert [spec.architectures for spec in register_models()] == [("Glm4ForCausalLM",), ("Glm4MoeForCausalLM",)]


def test_what_files_leave_out_is_transformers_default() -> None:
    dense, sparse = shape(GLM4), shape(GLM4_MOE)
    assert (dense.head_dim, dense.rope.rotary_dim, dense.qkv_bias, dense.rms_eps) == (128, 64, True, 1.5625e-7)
    assert (sparse.head_dim, sparse.rope.rotary_dim, sparse.qkv_bias, sparse.rms_eps) == (4, 2, False, 1e-5)
    assert not shape(GLM4 | {"attention_bias": False}).qkv_bias
    assert shape(GLM4 | {"head_dim": 8, "partial_rotary_factor": 0.25}).rope.rotary_dim == 2


def test_the_numbers_of_heads_and_experts_have_transformers_defaults_too() -> None:
    left_out = ("num_key_value_heads", "first_k_dense_replace", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
    dense, sparse = (shape({key: value for key, value in each.items() if key not in left_out}) for each in (GLM4, GLM4_MOE))
    assert dense.num_kv_heads == 2
    experts = sparse.experts
    assert experts is not None
    assert (experts.num_experts, experts.routing.top_k, experts.shared_size, experts.layers) == (128, 8, 12, {1, 2})


def test_head_norms_and_biases_are_switches_of_glm4_moe() -> None:
    assert not shape(GLM4_MOE).qk_norm
    both = shape(GLM4_MOE | {"use_qk_norm": True, "attention_bias": True})
    assert (both.qk_norm, both.qkv_bias, both.out_bias) == (True, True, False)


def test_the_router_is_deepseek_v3s() -> None:
    experts = shape(GLM4_MOE).experts
    assert experts is not None
    assert experts.routing == Routing(top_k=2, scoring="sigmoid", group_score="top2", renormalise=True, scale=2.5)
    assert (experts.layers, experts.shared_size, experts.correction_bias) == ({1, 2}, 12, True)


def test_the_layer_behind_the_last_is_ignored() -> None:
    """Layer 46 of GLM-4.5-Air; a file of GLM-4.5 has a layer 46 too, which is asked for there."""
    (ignored,) = (spec.ignored_weights for spec in register_models() if spec.name == "glm4-moe")
    assert callable(ignored)
    assert [*ignored(GLM4_MOE | {"num_hidden_layers": 46})] == ["model.layers.46.*"]
    assert [*ignored(GLM4_MOE | {"num_hidden_layers": 92})] == ["model.layers.92.*"]


@pytest.mark.parametrize(
    ("stated", "suits"), [({}, False), ({"num_nextn_predict_layers": 0}, False), ({"num_nextn_predict_layers": 1}, True)]
)
def test_a_drafter_takes_that_layer_where_config_json_states_it(stated: dict[str, object], *, suits: bool) -> None:
    (mtp,) = register_drafters()
    assert mtp.suits is not None
    assert mtp.model is not None
    assert mtp.suits(GLM4_MOE | stated) is suits
    if suits:
        assert len(mtp.model.describe(GLM4_MOE | stated).layers) == 1


@pytest.mark.parametrize("wrong", [{"hidden_act": "gelu"}, {"scoring_func": "softmax"}, {"num_experts_per_tok": 9}])
def test_what_cannot_be_served_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(CheckpointError):
        describe(GLM4_MOE | wrong)


def test_neighbouring_rows_come_apart_in_queries_and_keys() -> None:
    """Heads of 6 dims, 4 of them rotated."""
    decoder = shape({**GLM4, "head_dim": 6})
    assert decoder.rotates_neighbours
    assert RowOrder.split_pairs(6, first=0, count=4).places == (0, 2, 1, 3, 4, 5)
