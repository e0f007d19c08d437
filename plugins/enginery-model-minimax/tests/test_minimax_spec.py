"""What config.json means. Logits and tokens are compared with transformers in tests/parity."""

from __future__ import annotations

import pytest

from enginery.api import CheckpointError
from enginery_model_minimax import register_models
from enginery_model_minimax.spec import HUB_TEXT, Residual, describe, ignored_by_m2, m2_shape, text_shape

SIZES = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=64,
    head_dim=8,
)
SECOND = SIZES | dict(  # the keys of MiniMax-M2's config.json
    architectures=["MiniMaxM2ForCausalLM"],
    attn_type_list=[1, 1, 1, 1],
    qk_norm_type="per_layer",
    rotary_dim=4,
    scoring_func="sigmoid",
    shared_intermediate_size=0,
    use_qk_norm=True,
    use_routing_bias=True,
)
TEXT = SIZES | dict(  # and of MiniMax-Text-01's
    architectures=["MiniMaxText01ForCausalLM"],
    attn_type_list=[0, 0, 0, 1],
    layernorm_full_attention_alpha=3.5,
    layernorm_full_attention_beta=1.0,
    layernorm_linear_attention_alpha=2.5,
    layernorm_linear_attention_beta=0.5,
    layernorm_mlp_alpha=1.5,
    layernorm_mlp_beta=1.0,
    postnorm=True,
    rotary_dim=4,
    shared_intermediate_size=0,
    sliding_window=None,
)


def test_all_names_are_offered() -> None:
    offered = {name for spec in register_models() for name in spec.architectures}
    assert offered == {"MiniMaxM2ForCausalLM", "MiniMaxForCausalLM", *HUB_TEXT}


def test_m2_has_a_sigmoid_router_beside_its_bias_and_rotates_half() -> None:
    shape = m2_shape(SECOND)
    assert shape.experts is not None
    assert (shape.experts.routing.scoring, shape.experts.names.correction) == ("sigmoid", "e_score_correction_bias")
    assert (shape.rope.rotary_dim, shape.rope.theta) == (4, 5e6)
    assert m2_shape(SECOND | {"rotary_dim": None, "rope_parameters": {"partial_rotary_factor": 0.25}}).rope.rotary_dim == 2


@pytest.mark.parametrize(
    "changed",
    [{"scoring_func": "softmax"}, {"use_qk_norm": False}, {"attn_type_list": [0, 1, 1, 1]}, {"shared_intermediate_size": 8}],
)
def test_what_m2_is_not_served_with_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(changed))):
        m2_shape(SECOND | changed)


def test_hub_files_of_text_say_the_same_as_transformers_but_for_the_rotation() -> None:
    hub = text_shape(TEXT)
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    new = text_shape(
        SIZES
        | dict(
            architectures=["MiniMaxForCausalLM"],
            layer_types=kinds,
            full_attn_alpha_factor=3.5,
            linear_attn_alpha_factor=2.5,
            linear_attn_beta_factor=0.5,
            mlp_alpha_factor=1.5,
        )
    )
    assert hub.linear == new.linear == (True, True, True, False)
    assert hub.linear_residual == new.linear_residual == Residual(alpha=2.5, beta=0.5)
    assert (hub.full_residual, hub.mlp_residual) == (new.full_residual, new.mlp_residual)
    assert (hub.decoder.rope.rotary_dim, new.decoder.rope.rotary_dim) == (4, 8)
    assert [layer.recurrent is not None for layer in describe(TEXT).layers] == [True, True, True, False]


def test_later_layers_forget_less() -> None:
    first, last = text_shape(TEXT).log_decay(0), text_shape(TEXT).log_decay(3)
    assert first == pytest.approx([-0.25, -0.0625, -0.015625, -0.00390625], rel=1e-4)
    assert all(early < late <= 0 for early, late in zip(first, last, strict=True))


@pytest.mark.parametrize("changed", [{"postnorm": False}, {"sliding_window": 8}, {"attn_type_list": [0, 1]}])
def test_what_text_is_not_served_with_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(CheckpointError):
        text_shape(TEXT | changed)


@pytest.mark.parametrize("key", ["layernorm_mlp_beta", "mlp_beta_factor"])
def test_a_factor_that_is_null_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"has no '{key}'"):
        text_shape(TEXT | {key: None})


def test_layers_that_predict_further_tokens_are_ignored() -> None:
    assert ignored_by_m2(SECOND) == []
    assert ignored_by_m2(SECOND | {"num_mtp_modules": 2}) == ["model.layers.4.*", "model.layers.5.*"]
