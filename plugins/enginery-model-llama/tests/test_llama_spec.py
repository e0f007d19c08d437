"""What config.json means. Logits and tokens are compared with transformers in tests/parity."""

from __future__ import annotations

import pytest

from enginery.api import CheckpointError, Routing
from enginery_model_llama import register_models
from enginery_model_llama.spec import describe, shape

CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
)


MIXTRAL = CONFIG | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}


def test_llama_and_its_relatives_are_offered() -> None:
    offered = {name.removesuffix("ForCausalLM") for spec in register_models() for name in spec.architectures}
    assert offered == {"Llama", "Mistral", "Ministral", "Mixtral", "Phi3", "SmolLM3", "Granite"}


def test_left_out_heads_and_head_dim_follow_from_the_rest() -> None:
    facts = describe(CONFIG)
    assert [(layer.num_kv_heads, layer.head_dim, layer.sliding_window) for layer in facts.layers] == [(4, 4, None)] * 3
    assert describe(CONFIG | {"head_dim": 32, "num_key_value_heads": 2}).layers[0].head_dim == 32


def test_heads_that_kv_heads_cannot_serve_evenly_are_refused() -> None:
    with pytest.raises(CheckpointError, match="4 query heads, which is no multiple of its 3 KV heads"):
        describe(CONFIG | {"num_key_value_heads": 3})


def test_mistral_has_a_window_on_every_layer_unless_it_is_null() -> None:
    mistral = CONFIG | {"architectures": ["MistralForCausalLM"]}
    assert shape(mistral | {"sliding_window": 8}).windows == (8, 8, 8)
    assert shape(mistral | {"sliding_window": None}).windows == (None, None, None)
    assert shape(mistral).windows == (4096, 4096, 4096)


@pytest.mark.parametrize("name", ["MistralForCausalLM", "MinistralForCausalLM"])
def test_mistral_has_windows_where_layer_types_say_so(name: str) -> None:
    mistral = CONFIG | {"architectures": [name], "sliding_window": 8}
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    assert shape(mistral | {"layer_types": kinds}).windows == (None, 8, 8)
    assert shape(mistral | {"layer_types": None}).windows == (8, 8, 8)
    with pytest.raises(CheckpointError, match=r"layer_types .* for each of 3 layers"):
        shape(mistral | {"layer_types": kinds[:2]})


def test_mistral_has_no_biases_whatever_the_file_says() -> None:
    mistral = shape(CONFIG | {"architectures": ["MistralForCausalLM"], "attention_bias": True, "mlp_bias": True})
    assert (mistral.qkv_bias, mistral.out_bias, mistral.mlp_bias) == (False, False, False)


def test_swish_is_a_name_of_silu() -> None:
    assert shape(CONFIG | {"hidden_act": "swish"}) == shape(CONFIG | {"hidden_act": "silu"})


def test_phi_3_has_a_window_where_contexts_fill_it() -> None:
    phi = CONFIG | {"architectures": ["Phi3ForCausalLM"]}
    assert shape(phi | {"sliding_window": 16}).windows == (16, 16, 16)
    assert shape(phi | {"sliding_window": 262_144}).windows == shape(phi).windows == (None, None, None)
    assert shape(phi | {"sliding_window": 64, "max_position_embeddings": 64}).windows == (None, None, None)


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi_3_has_longrope_under_the_names_that_it_had_before_too(name: str) -> None:
    rope = {"type": name, "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
    assert shape(CONFIG | {"architectures": ["Phi3ForCausalLM"], "rope_scaling": rope}).rope.kind == "longrope"


def test_smollm3_has_windows_where_it_has_no_positions() -> None:
    smol = CONFIG | {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0, 1], "sliding_window": 8}
    assert shape(smol | {"use_sliding_window": True}).windows == (None, 8, None)
    assert shape(smol).windows == (None, None, None)


def test_mixtral_has_experts_in_every_layer_and_no_window_unless_it_is_stated() -> None:
    mixtral = shape(MIXTRAL)
    assert mixtral.experts is not None
    assert mixtral.experts.layers == {0, 1, 2}
    assert (mixtral.experts.num_experts, mixtral.experts.inner_size, mixtral.experts.shared_size) == (8, 24, 0)
    assert mixtral.experts.routing == Routing(top_k=2, renormalise=True)
    assert (mixtral.windows, mixtral.rope.theta, mixtral.rms_eps) == ((None,) * 3, 1e6, 1e-5)
    assert shape(MIXTRAL | {"sliding_window": 8}).windows == (8, 8, 8)
    assert shape(CONFIG).experts is None


def test_the_memory_plan_counts_what_experts_keep_alive() -> None:
    """Two experts' inner values and outputs, of which a dense layer has none."""
    assert describe(MIXTRAL).activation_width - describe(CONFIG).activation_width >= 2 * (3 * 24 + 16) - 3 * 24


@pytest.mark.parametrize("wrong", [{"num_local_experts": None}, {"num_experts_per_tok": 9}, {"num_experts_per_tok": 0}])
def test_a_routing_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"num_local_experts|num_experts_per_tok|experts per token"):
        describe(MIXTRAL | wrong)


def test_both_spellings_of_rope_are_read() -> None:
    old = shape(CONFIG | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}).rope
    new = shape(CONFIG | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}).rope
    assert old == new
    assert (old.kind, old.theta, old.parameters["factor"]) == ("linear", 5e5, 2.0)


@pytest.mark.parametrize("wrong", [{"hidden_act": "gelu"}, {"num_key_value_heads": 3}, {"vocab_size": None}])
def test_what_cannot_be_served_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(CheckpointError):
        describe(CONFIG | wrong)


def test_a_part_of_each_head_is_rotated_in_phi_3_alone() -> None:
    """Transformers rotates all of it elsewhere, whatever the file says."""
    half = {"partial_rotary_factor": 0.5}
    assert shape(CONFIG | half | {"architectures": ["Phi3ForCausalLM"]}).rope.rotary_dim == 2
    for name in ("Llama", "Mistral", "SmolLM3", "Granite"):
        with pytest.raises(CheckpointError, match=r"partial_rotary_factor, for 2 of 4 dims"):
            shape(CONFIG | half | {"architectures": [f"{name}ForCausalLM"]})
