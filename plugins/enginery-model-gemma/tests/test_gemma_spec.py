"""What config.json means. Logits and tokens are compared with transformers in tests/parity."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import Gemma2Config, Gemma3TextConfig

from enginery.api import CheckpointError
from enginery_model_gemma import register_models
from enginery_model_gemma.spec import describe, shape

SIZES = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=7, num_attention_heads=4, head_dim=8)
SECOND = SIZES | {"architectures": ["Gemma2ForCausalLM"], "max_position_embeddings": 64}
THIRD = SIZES | {"architectures": ["Gemma3ForCausalLM"], "max_position_embeddings": 64}


def test_all_are_offered() -> None:
    offered = {name for spec in register_models() for name in spec.architectures}
    assert offered == {"GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"}


def test_files_of_the_hub_have_windows_by_their_pattern() -> None:
    assert shape(SECOND | {"sliding_window": 8}).windows == (8, None, 8, None, 8, None, 8)
    assert shape(THIRD | {"sliding_window": 8}).windows == (8, 8, 8, 8, 8, None, 8)
    assert shape(THIRD | {"sliding_window": 8, "sliding_window_pattern": 3}).windows == (8, 8, None, 8, 8, None, 8)
    assert [layer.sliding_window for layer in describe(SECOND).layers][:2] == [4096, None]


def test_both_spellings_of_ropes_are_read() -> None:
    old = shape(THIRD | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6, "rope_local_base_freq": 1e4})
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    new = shape(THIRD | {"rope_parameters": ropes, "rope_local_base_freq": None, "rope_theta": None})
    assert (old.rope, old.window_rope) == (new.rope, new.window_rope)
    assert old.window_rope is not None
    assert (old.rope.theta, old.window_rope.theta, old.window_rope.kind) == (1e6, 1e4, "default")
    ropes["full_attention"] = {"rope_type": "default", "rope_theta": 1e6}
    added = shape(THIRD | {"rope_parameters": ropes, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert (added.rope, added.window_rope) == (old.rope, old.window_rope)


def test_a_rope_that_is_stated_for_one_kind_of_layer_leaves_the_other_its_default() -> None:
    plain, stated = shape(THIRD), {"rope_type": "default", "rope_theta": 1234.0}
    full, local = (shape(THIRD | {"rope_parameters": {kind: stated}}) for kind in ("full_attention", "sliding_attention"))
    assert (full.rope.theta, full.window_rope) == (1234.0, plain.window_rope)
    assert local.window_rope is not None
    assert (local.rope, local.window_rope.theta) == (plain.rope, 1234.0)
    with pytest.raises(CheckpointError, match="rope_parameters"):
        shape(THIRD | {"rope_parameters": stated})


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_caps_that_are_no_numbers_are_refused(key: str) -> None:
    assert shape(SECOND | {key: None}) != shape(SECOND)
    for value in ("50.0", 0, [30.0]):
        with pytest.raises(CheckpointError, match=rf"{key} .*, which must be a number above 0, or null"):
            shape(SECOND | {key: value})


def test_a_cap_of_scores_is_refused_in_gemma_3_where_transformers_has_the_key_and_caps_nothing() -> None:
    assert shape(THIRD | {"attn_logit_softcapping": None}) == shape(THIRD)
    with pytest.raises(CheckpointError, match=r"attn_logit_softcapping 50\.0; Gemma 3 is served without"):
        shape(THIRD | {"attn_logit_softcapping": 50.0})


@pytest.mark.parametrize(("given", "made"), [(SECOND, Gemma2Config), (THIRD, Gemma3TextConfig)])
def test_what_a_file_leaves_out_is_what_transformers_takes(given: dict[str, object], made: type) -> None:
    stated = made(**{key: value for key, value in given.items() if key != "architectures"}).to_dict()
    assert shape(stated | {"architectures": given["architectures"]}) == shape(given)


def test_the_text_of_a_model_for_images_is_read_as_the_hub_has_it() -> None:
    """google/gemma-3-4b-it's `text_config`, which says no more than that."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    read = shape({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text})
    stated = Gemma3TextConfig(**text).to_dict() | {"architectures": ["Gemma3ForCausalLM"]}
    assert read == dataclasses.replace(shape(stated), stem="language_model.model")


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_activation": "silu"},
        {"use_bidirectional_attention": True},
        {"layer_types": ["full_attention"]},
        {"vocab_size": None},
    ],
)
def test_what_cannot_be_served_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(CheckpointError):
        describe(THIRD | wrong)


@pytest.mark.parametrize("config", [SECOND, THIRD])
def test_what_attention_and_mlp_may_have_otherwise_is_served_or_named(config: dict[str, object]) -> None:
    biased = shape(config | {"attention_bias": True})
    assert (biased.qkv_bias, biased.out_bias, shape(config).qkv_bias) == (True, True, False)
    with pytest.raises(CheckpointError, match="hidden_activation 'gelu'"):
        shape(config | {"hidden_activation": "gelu"})


def test_every_generation_refuses_an_activation_in_the_same_words() -> None:
    said = []
    for config, key in ((SECOND | {"architectures": ["GemmaForCausalLM"]}, "hidden_act"), (SECOND, "hidden_activation")):
        with pytest.raises(CheckpointError, match=f"has {key} 'silu'; this architecture is served with ") as error:
            shape(config | {key: "silu"})
        said.append(str(error.value).replace(key, "it").replace(" or 'gelu'", ""))
    assert said[0] == said[1]


@pytest.mark.parametrize("config", [SECOND, THIRD, SECOND | {"architectures": ["GemmaForCausalLM"]}])
def test_a_part_of_each_head_is_not_rotated(config: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="partial_rotary_factor, for 4 of 8 dims"):
        shape(config | {"partial_rotary_factor": 0.5})
