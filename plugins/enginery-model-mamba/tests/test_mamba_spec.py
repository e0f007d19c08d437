"""What config.json means. Logits and tokens are compared with transformers in tests/parity."""

from __future__ import annotations

import math
from typing import Any

import pytest

from enginery.api import CheckpointError
from enginery_model_mamba import register_models
from enginery_model_mamba.mixers import read_mixer
from enginery_model_mamba.spec import falcon, hybrids, jamba, lfm2, mamba2, nemotron

SIZES = dict(vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
MIXER = dict(mamba_n_heads=8, mamba_d_state=16)
BAMBA = SIZES | MIXER | {"architectures": ["BambaForCausalLM"]}
GRANITE = SIZES | MIXER | {"architectures": ["GraniteMoeHybridForCausalLM"]}
NEMOTRON = {"vocab_size": 32, "hidden_size": 64, "hybrid_override_pattern": "M-M*E"}


def rules(facts: Any) -> list[tuple[int, str | None]]:
    return [(layer.decoder_layer, layer.recurrent and layer.recurrent.rule) for layer in facts.layers]


def test_all_are_offered() -> None:
    offered = {name for spec in register_models() for name in spec.architectures}
    assert len(offered) == 8
    assert {"Mamba2ForCausalLM", "JambaForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"} <= offered


def test_mamba2_needs_nothing_of_attention() -> None:
    facts = mamba2.describe({"vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16})
    rule = facts.layers[0].recurrent
    assert rule is not None
    assert (len(facts.layers), rule.key_heads, rule.value_heads, rule.key_dim) == (2, 8, 8, 128)


def test_heads_must_fill_the_inner_values() -> None:
    with pytest.raises(CheckpointError, match="num_heads 8 of 8 dims"):
        mamba2.describe({"vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8})


@pytest.mark.parametrize(
    ("stated", "limits"),
    [
        (None, (0.0, math.inf)),
        ([0.0, {"__float__": "Infinity"}], (0.0, math.inf)),
        ([0.001, 0.1], (0.001, 0.1)),
        ([0.0, "Infinity"], (0.0, math.inf)),
    ],
)
def test_limits_of_steps_are_read_as_json_has_them(stated: object, limits: tuple[float, float]) -> None:
    config = {**hybrids.BAMBA, **BAMBA, "time_step_limit": stated}
    assert read_mixer(config, hybrids.KEYS).facts.step_limits == limits


def test_damaged_limits_of_steps_are_refused() -> None:
    with pytest.raises(CheckpointError, match="time_step_limit"):
        read_mixer({**hybrids.BAMBA, **BAMBA, "time_step_limit": [0.0]}, hybrids.KEYS)


def test_a_convolution_of_one_token_is_refused() -> None:
    """Backends tell by the state whether there is a convolution, and this one has none."""
    with pytest.raises(CheckpointError, match="a convolution of one token, which is not served"):
        hybrids.describe(BAMBA | {"mamba_d_conv": 1})


def test_bamba_says_where_attention_is() -> None:
    assert rules(hybrids.describe(BAMBA | {"attn_layer_indices": [2]})) == [(0, "linear"), (1, "linear"), (2, None), (3, "linear")]
    assert hybrids.shape(BAMBA).rope.rotary_dim == 8


@pytest.mark.parametrize("key", ["layer_types", "layers_block_type"])
@pytest.mark.parametrize("words", [("mamba", "attention"), ("linear_attention", "full_attention")])
def test_granite_names_its_layers_in_two_ways(key: str, words: tuple[str, str]) -> None:
    facts = hybrids.describe(GRANITE | {key: [words[0], words[1], words[0], words[0]]})
    assert rules(facts) == [(0, "linear"), (1, None), (2, "linear"), (3, "linear")]


def test_granite_without_experts_and_without_positions() -> None:
    assert hybrids.shape(GRANITE | {"num_local_experts": 0}).experts is None
    assert hybrids.shape(GRANITE).experts is not None
    assert not hybrids.rotates(GRANITE | {"position_embedding_type": "nope"})
    assert hybrids.rotates(GRANITE | {"position_embedding_type": "rope"})
    with pytest.raises(CheckpointError, match="learned"):
        hybrids.describe(GRANITE | {"position_embedding_type": "learned"})


def test_unknown_layers_are_refused() -> None:
    with pytest.raises(CheckpointError, match="layer_types"):
        hybrids.describe(GRANITE | {"layer_types": ["mamba", "window", "mamba", "mamba"]})
    with pytest.raises(CheckpointError, match="3 layer_types for 4 layers"):
        hybrids.describe(GRANITE | {"layer_types": ["mamba"] * 3})


def test_falcon_has_two_layers_with_memory_in_each() -> None:
    config = SIZES | MIXER | {"architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 128, "key_multiplier": 0.5}
    facts = falcon.describe(config)
    assert rules(facts) == [(index, rule) for index in range(4) for rule in ("linear", None)]
    assert falcon.shape(config).attention_scale == 0.5 / 4
    with pytest.raises(CheckpointError, match="ssm_multipliers"):
        falcon.describe(config | {"ssm_multipliers": [1.0]})
    with pytest.raises(CheckpointError, match=r"mlp_multipliers .*, which must be 2 numbers"):
        falcon.describe(config | {"mlp_multipliers": [None, 1.0]})


@pytest.mark.parametrize(("norm_first", "gate_first"), [({}, False), (True, False), (False, True), (None, True)])
def test_falcon_s_gate_is_before_the_norm_where_that_is_false_or_null(norm_first: Any, gate_first: bool) -> None:
    stated = norm_first if norm_first == {} else {"mamba_norm_before_gate": norm_first}
    assert falcon.read_falcon_mixer(SIZES | MIXER | {"mamba_d_ssm": 128} | stated).gate_first is gate_first


@pytest.mark.parametrize("family", [falcon.read_falcon_mixer, lambda config: nemotron.describe(NEMOTRON | config)])
def test_swish_is_a_name_of_silu(family: Any) -> None:
    family(SIZES | MIXER | {"mamba_d_ssm": 128, "hidden_act": "swish", "mamba_hidden_act": "swish"})


def test_nemotron_is_read_from_letters_and_words() -> None:
    words = {"layers_block_type": ["mamba", "mlp", "linear_attention", "full_attention", "moe"]}
    for config in (NEMOTRON, {**NEMOTRON, "hybrid_override_pattern": None} | words):
        facts = nemotron.describe(config)
        assert rules(facts) == [(0, "linear"), (2, "linear"), (3, None)]
        assert facts.num_decoder_layers == 5


def test_nemotron_s_heads_have_the_dims_that_the_hub_states() -> None:
    assert nemotron.shape(NEMOTRON | {"attention_head_dim": 64}).head_dim == 64
    assert nemotron.shape(NEMOTRON | {"attention_head_dim": 64, "head_dim": 32}).head_dim == 32


@pytest.mark.parametrize("changes", [{"mlp_hidden_act": "silu"}, {"sliding_window": 8}, {"moe_latent_size": 8, "mlp_bias": True}])
def test_nemotron_refuses_what_changes_the_numbers(changes: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        nemotron.describe(NEMOTRON | changes)


def test_nemotron_names_the_activation_that_is_not_served() -> None:
    with pytest.raises(CheckpointError, match="has mamba_hidden_act 'gelu'; this architecture is served with 'silu' or 'swish'"):
        nemotron.describe(NEMOTRON | {"mamba_hidden_act": "gelu"})


def test_jamba_has_a_convolution_and_a_scan_in_a_layer() -> None:
    config = SIZES | {"attn_layer_period": 4, "attn_layer_offset": 1}
    assert rules(jamba.describe(config))[:4] == [(0, "conv"), (0, "scan"), (1, None), (2, "conv")]
    assert jamba.read_scan(config).step_rank == 4
    experts = jamba.shape(config).experts
    assert experts is not None
    assert experts.layers == {1, 3}
    with pytest.raises(CheckpointError, match="attn_layer_offset"):
        jamba.describe(config | {"attn_layer_offset": 4})


LFM2 = SIZES | {"architectures": ["Lfm2ForCausalLM"], "full_attn_idxs": [1]}
LFM2_MOE = LFM2 | {"architectures": ["Lfm2MoeForCausalLM"], "moe_intermediate_size": 12, "num_dense_layers": 1}


def test_lfm2_has_experts_behind_its_first_layers() -> None:
    experts = lfm2.shape(LFM2_MOE).experts
    assert experts is not None
    assert (experts.layers, experts.inner_size, experts.num_experts) == ({1, 2, 3}, 12, 32)
    assert (experts.routing.scoring, experts.routing.top_k, experts.correction_bias) == ("sigmoid", 4, True)
    assert lfm2.shape(LFM2_MOE).intermediate_size == 96
    assert lfm2.shape(LFM2).experts is None


def test_lfm2_computes_the_size_of_its_mlp() -> None:
    config = LFM2 | {"block_ff_dim": 300, "block_multiple_of": 64}
    assert rules(lfm2.describe(config)) == [(0, "conv"), (1, None), (2, "conv"), (3, "conv")]
    assert (lfm2.shape(config).intermediate_size, lfm2.shape(config).tied) == (256, True)
    assert lfm2.shape(config | {"block_auto_adjust_ff_dim": False}).intermediate_size == 300


@pytest.mark.parametrize(
    ("family", "config"),
    [
        (hybrids, BAMBA),
        (falcon, SIZES | MIXER | {"mamba_d_ssm": None}),
        (jamba, SIZES),
        (nemotron, NEMOTRON | {"num_attention_heads": 4}),
    ],
)
def test_kv_heads_that_are_null_are_as_many_as_heads(family: Any, config: dict[str, object]) -> None:
    """Left out, there are 8."""
    assert family.shape(config | {"num_key_value_heads": None}).num_kv_heads == 4
    assert family.shape({key: value for key, value in config.items() if key != "num_key_value_heads"}).num_kv_heads == 8


MAMBA2 = {"vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16}


@pytest.mark.parametrize(
    ("family", "config", "key"),
    [
        (mamba2, MAMBA2, "layer_norm_epsilon"),
        (lfm2, LFM2, "norm_eps"),
        (lfm2, LFM2 | {"tie_word_embeddings": False}, "tie_embedding"),
        (lfm2, LFM2_MOE, "routed_scaling_factor"),
    ],
)
def test_a_key_that_is_null_is_as_one_that_is_left_out(family: Any, config: dict[str, object], key: str) -> None:
    assert key not in config
    assert family.shape(config | {key: None}) == family.shape(config)
    assert family.describe(config | {key: None}) == family.describe(config)


def test_lfm2_without_a_factor_does_not_round_the_size_of_its_mlp() -> None:
    config = LFM2 | {"block_ff_dim": 300}
    assert lfm2.shape(config | {"block_ffn_dim_multiplier": None}).intermediate_size == 200
    assert lfm2.shape(config).intermediate_size == 256


@pytest.mark.parametrize(
    ("family", "config"),
    [
        (hybrids, GRANITE | {"position_embedding_type": "rope"}),
        (falcon, SIZES | MIXER | {"mamba_d_ssm": None}),
        (lfm2, SIZES | {"architectures": ["Lfm2ForCausalLM"]}),
    ],
)
def test_a_part_of_each_head_is_rotated_in_bamba_alone(family: Any, config: dict[str, object]) -> None:
    """Transformers rotates all of it in the others, whatever the file says."""
    with pytest.raises(CheckpointError, match="partial_rotary_factor, for 8 of 16 dims"):
        family.shape(config | {"partial_rotary_factor": 0.5})


def test_nemotron_needs_a_layer_that_looks_back() -> None:
    with pytest.raises(CheckpointError, match="hybrid_override_pattern"):
        nemotron.describe(NEMOTRON | {"hybrid_override_pattern": "-E-"})


def test_granite_without_positions_takes_any_factor_of_them() -> None:
    assert hybrids.shape(GRANITE | {"partial_rotary_factor": 0.5}) == hybrids.shape(GRANITE)
