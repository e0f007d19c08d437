"""Mamba2 and its hybrids, Jamba and LFM2 equal transformers: logits, and greedy tokens however the work is cut up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pairwise import EVERYTHING, in_turn, spread
from parity.engine_driver import assert_cut_up, assert_greedy, assert_last_logits, greedy, options, rounding_error
from parity.oracle import ROPES, Oracle, shape
from safetensors.torch import load_file
from transformers import (
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Mamba2Config,
    NemotronHConfig,
    PretrainedConfig,
)

from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

MIXER = dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=24, mamba_chunk_size=16)
GRANITE = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    shared_intermediate_size=48,
    embedding_multiplier=12.0,
    logits_scaling=8.0,
    residual_multiplier=0.22,
    attention_multiplier=0.0625,
)
FACTORS = dict(
    key_multiplier=0.5,
    attention_in_multiplier=0.7,
    attention_out_multiplier=0.8,
    embedding_multiplier=2.0,
    lm_head_multiplier=0.5,
    ssm_in_multiplier=1.1,
    ssm_out_multiplier=0.9,
    mlp_multipliers=[0.9, 1.1],
    ssm_multipliers=[0.5, 0.6, 0.7, 0.8, 0.9],
)
BIASED = dict(mamba_proj_bias=True, projectors_bias=True, attention_bias=True, mlp_bias=True)
NEMOTRON = {key: value for key, value in shape().items() if key != "num_hidden_layers"} | dict(
    head_dim=16,
    ssm_state_size=24,
    mamba_num_heads=8,
    mamba_head_dim=12,
    n_groups=2,
    chunk_size=16,
    time_step_min=1e-9,  # to which transformers raises steps in prompts, and the vendor does not
    n_routed_experts=8,
    moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=48,
    num_experts_per_tok=2,
    routed_scaling_factor=2.5,
    experts_implementation="eager",
)
FAMILIES: dict[str, PretrainedConfig] = {
    "bamba": BambaConfig(**shape(attn_layer_indices=[2], attention_bias=True, **MIXER)),
    "falcon_h1": FalconH1Config(**shape(mamba_d_ssm=128, mamba_rms_norm=True, mamba_norm_before_gate=False, **MIXER, **FACTORS)),
    "falcon_h1_norm_first": FalconH1Config(**shape(mamba_d_ssm=128, mamba_rms_norm=True, projectors_bias=True, **MIXER)),
    "falcon_h1_no_norm": FalconH1Config(**shape(mamba_d_ssm=128, **BIASED, **MIXER, **FACTORS)),
    "granite": GraniteMoeHybridConfig(**shape(num_local_experts=0, position_embedding_type="rope", **MIXER, **GRANITE)),
    "granite_moe": GraniteMoeHybridConfig(
        **shape(num_local_experts=6, num_experts_per_tok=2, experts_implementation="eager", **MIXER, **GRANITE),
        rope_parameters={**ROPES["yarn"], "attention_factor": 3.0},  # it has no positions, and nothing of this
    ),
    "jamba": JambaConfig(
        **shape(num_experts=4, attn_layer_period=4, attn_layer_offset=2, mamba_d_state=12, mamba_dt_rank=8),
        experts_implementation="eager",
    ),
    "jamba_dense": JambaConfig(**shape(num_experts=1, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=12)),
    "lfm2": Lfm2Config(**shape(layer_types=["conv", "full_attention", "conv", "conv"], block_multiple_of=16, conv_bias=True)),
    "lfm2_moe": Lfm2MoeConfig(
        **shape(
            layer_types=["conv", "full_attention", "conv", "conv"], moe_intermediate_size=32, num_experts=8, num_dense_layers=1
        ),
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
        experts_implementation="eager",
    ),
    "nemotron_h": NemotronHConfig(**NEMOTRON, layers_block_type=["mamba", "mlp", "mamba", "attention", "mlp"]),
    "nemotron_h_moe": NemotronHConfig(**NEMOTRON, layers_block_type=["mamba", "moe", "attention", "mamba", "moe"]),
    "nemotron_h_latent": NemotronHConfig(**NEMOTRON, layers_block_type=["moe", "mamba", "attention"], moe_latent_size=32),
    "mamba2": Mamba2Config(
        vocab_size=256,
        hidden_size=64,
        num_heads=8,
        head_dim=16,
        state_size=24,
        num_hidden_layers=3,
        n_groups=2,
        chunk_size=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


# One of each kind of state that a prompt goes on from; of three, those of different rules: test_kinds_at_random has the others.
STATES = sorted(FAMILIES) if EVERYTHING else ["bamba", "jamba", "falcon_h1", "lfm2", "mamba2"]


@pytest.fixture(params=sorted(FAMILIES))
def oracle(request: pytest.FixtureRequest, write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle(request.param, FAMILIES[request.param])


def test_logits_after_a_prompt_are_transformers(oracle: Oracle, registry: Registry) -> None:
    assert_last_logits(oracle, registry, oracle.prompts[:3])


@pytest.mark.parametrize("oracle", ["granite_moe", "jamba", "lfm2_moe"], indirect=True)
def test_experts_that_transformers_stored_in_one_piece_are_read(oracle: Oracle, registry: Registry, tmp_path: Path) -> None:
    oracle.model.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith(".experts.gate_up_proj") for name in load_file(tmp_path / "model.safetensors"))
    assert_last_logits(oracle, registry, oracle.prompts[1:2], model=str(tmp_path))


CUTS: list[dict[str, object]] = [
    {},
    {"max_batch_tokens": 7, "page_size": 1},
    {"num_pages": 10, "page_size": 16},
    {"overlap": True},
]
# On a CPU several at once: so each family is preempted.
TOGETHER: list[dict[str, object]] = [
    {"num_pages": 10, "page_size": 16},
    {"num_pages": 120, "max_batch_tokens": 7, "page_size": 1, "overlap": True},
]


@in_turn(("oracle", spread(sorted(FAMILIES), 7)), ("changes", CUTS if EVERYTHING else TOGETHER), indirect=["oracle"])
def test_greedy_tokens_are_transformers_however_the_work_is_cut_up(
    oracle: Oracle, registry: Registry, changes: dict[str, object]
) -> None:
    assert_cut_up(oracle, registry, changes, oracle.prompts[:5])


@pytest.mark.parametrize("oracle", spread(STATES, 3), indirect=True)
def test_a_prompt_seen_before_goes_on_from_its_states(oracle: Oracle, registry: Registry) -> None:
    engine, prompt = Engine.build(options(oracle, page_size=16), registry), oracle.prompts[4]
    answers, cached = [], []
    for _ in range(3):
        engine.submit(greedy("again", prompt))
        outputs = [output for _ in iter(lambda: engine.has_work, False) for output in engine.step()]
        answers.append([token for output in outputs for token in output.token_ids])
        cached.append(outputs[-1].num_cached_tokens)
    assert cached == [0, 32, 32]
    assert_greedy(oracle, answers, [prompt] * 3)


def test_half_precision_stays_close(oracle: Oracle, registry: Registry) -> None:
    assert rounding_error(oracle, registry) < 0.05
