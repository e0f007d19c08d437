"""What config.json of Ling 1 and 2.0 means. Logits and tokens are compared with transformers in tests/parity."""

from __future__ import annotations

import pytest

from enginery.api import CheckpointError, Routing, next_layers
from enginery_model_bailing import register_drafters
from enginery_model_bailing.spec.ling import shape

LING1 = dict(
    architectures=["BailingMoeForCausalLM"],
    hidden_size=64,
    intermediate_size=32,
    max_position_embeddings=512,
    model_type="bailing_moe",
    moe_intermediate_size=32,
    norm_head=False,
    norm_softmax=False,
    norm_topk_prob=True,
    num_attention_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
    num_hidden_layers=3,
    num_key_value_heads=2,
    num_shared_experts=2,
    rope_theta=600000,
    vocab_size=256,
)
LING2 = LING1 | dict(
    architectures=["BailingMoeV2ForCausalLM"],
    first_k_dense_replace=1,
    head_dim=16,
    moe_router_enable_expert_bias=True,
    moe_shared_expert_intermediate_size=48,
    n_group=4,
    partial_rotary_factor=0.5,
    routed_scaling_factor=2.5,
    score_function="sigmoid",
    topk_group=2,
    use_qk_norm=True,
)


def test_ling_2_routes_as_deepseek_v3() -> None:
    decoder = shape(LING2)
    assert decoder.experts is not None
    assert decoder.experts.routing == Routing(
        top_k=2, scoring="sigmoid", num_groups=4, top_groups=2, group_score="top2", renormalise=True, scale=2.5
    )
    assert (decoder.experts.layers, decoder.experts.shared_size, decoder.experts.correction_bias) == ({1, 2}, 96, True)
    assert (decoder.qk_norm, decoder.rope.rotary_dim, decoder.embedding) == (True, 8, "word_embeddings")


def test_ling_1_routes_by_softmax_in_every_layer_and_norms_no_heads() -> None:
    decoder = shape(LING1)
    assert decoder.experts is not None
    assert decoder.experts.routing == Routing(top_k=2, renormalise=True)
    assert (decoder.experts.layers, decoder.experts.shared_size, decoder.experts.correction_bias) == ({0, 1, 2}, 64, False)
    assert (decoder.qk_norm, decoder.rope.rotary_dim) == (False, 16)


@pytest.mark.parametrize("config", [LING1, LING2])
def test_a_file_without_the_number_of_experts_is_refused_by_that_name(config: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="has no 'num_experts'"):
        shape({key: value for key, value in config.items() if key != "num_experts"})


@pytest.mark.parametrize(
    ("changed", "dims"),
    [
        ({"rotary_dim": 8}, 8),
        ({"partial_rotary_factor": None, "rotary_dim": 4}, 4),
        ({"partial_rotary_factor": None, "rotary_dim": None}, 16),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}, 4),
    ],
)
def test_rotated_dims_are_stated_by_number_or_factor(changed: dict[str, object], dims: int) -> None:
    assert shape(LING2 | changed).rope.rotary_dim == dims


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_act": "gelu"},
        {"moe_router_enable_expert_bias": False},
        {"n_group": None},
        {"norm_head": True},
        {"norm_topk_prob": False},
        {"rotary_dim": 4},
        {"rotary_dim": 32, "partial_rotary_factor": 1.0},
        {"routed_scaling_factor": None},
        {"score_function": "softmax"},
        {"topk_group": None},
        {"use_bias": True},
        {"use_qk_norm": False},
        {"use_rmsnorm": False},
        {"use_sliding_window": True},
    ],
    ids=str,
)
def test_what_ling_2_is_not_served_with_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(changed))):
        shape(LING2 | changed)


@pytest.mark.parametrize(
    "changed", [{"n_group": 8}, {"norm_softmax": True}, {"score_function": "sigmoid"}, {"use_qk_norm": True}], ids=str
)
def test_what_ling_1_is_not_served_with_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(changed))):
        shape(LING1 | changed)


def test_layers_behind_the_last_are_ignored_and_a_drafter_takes_them() -> None:
    (mtp,) = register_drafters()
    assert mtp.suits is not None
    assert mtp.model is not None
    assert not next_layers(LING2)
    assert not mtp.suits(LING2)
    base = LING2 | {"num_nextn_predict_layers": 2}
    assert next_layers(base) == ["model.layers.3.*", "model.layers.4.*"]
    assert mtp.suits(base)
    assert len(mtp.model.describe(base).layers) == 2
