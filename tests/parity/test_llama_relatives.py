"""Phi 3, SmolLM3, Granite and Ministral, which differ from Llama in a detail, equal transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parity.engine_driver import assert_greedy, generate, last_logits, options, rounding_error
from parity.oracle import ROPES, Oracle, shape
from transformers import GraniteConfig, MinistralConfig, Phi3Config, SmolLM3Config

import enginery_model_llama
from enginery.api import CheckpointError
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.testing.kits.ranks import RankAnswer, RankThreads
from enginery.testing.kits.weights import WholeTensors

# Of contexts beyond 8 tokens, as transformers looks at those of a forward pass and the engine at those that it serves.
FACTORS_OF_ROPE = dict(short_factor=[1.0, 1.2, 1.4, 1.6], long_factor=[2.0, 2.4, 2.8, 3.2])
LONG = dict(rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.5, original_max_position_embeddings=8, **FACTORS_OF_ROPE)
FACTORS = dict(embedding_multiplier=3.0, attention_multiplier=0.35, residual_multiplier=0.4, logits_scaling=0.5)
RELATIVES = {
    "granite3": GraniteConfig(**shape(**FACTORS)),
    "granite3-bias": GraniteConfig(**shape(**FACTORS, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "ministral": MinistralConfig(**shape(head_dim=16, sliding_window=16, layer_types=["full_attention", "sliding_attention"] * 2)),
    "phi3": Phi3Config(**shape()),
    "phi3-window": Phi3Config(**shape(sliding_window=16)),
    "phi3-long": Phi3Config(**shape(rope_parameters=LONG, original_max_position_embeddings=8, tie_word_embeddings=True)),
    "smollm3": SmolLM3Config(**shape(tie_word_embeddings=False)),
    "smollm3-yarn": SmolLM3Config(**shape(rope_parameters=ROPES["yarn"])),
    "smollm3-window": SmolLM3Config(**shape(no_rope_layers=[1, 0, 1, 0], use_sliding_window=True, sliding_window=16)),
}


@pytest.fixture(params=sorted(RELATIVES))
def oracle(request: pytest.FixtureRequest, write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle(request.param, RELATIVES[request.param])


def run(oracle: Oracle, *, tensor_size: int = 1, num_stages: int = 1) -> list[RankAnswer]:
    name = type(oracle.model).__name__
    (family,) = (spec for spec in enginery_model_llama.register_models() if name in spec.architectures)
    tensors = WholeTensors({name: tensor.detach() for name, tensor in oracle.model.state_dict().items()}, torch.float32)
    config = {**oracle.model.config.to_dict(), "architectures": [name]}
    return RankThreads(family=family, config=config, tensors=tensors, tensor_size=tensor_size, num_stages=num_stages).run(
        oracle.prompts[4]
    )


def test_the_blocks_give_transformers_logits(oracle: Oracle) -> None:
    (answer,) = run(oracle)
    torch.testing.assert_close(answer.logits, oracle.logits(oracle.prompts[4]), atol=1e-4, rtol=0)


def test_so_do_several_ranks_and_stages(oracle: Oracle) -> None:
    for answer in run(oracle, tensor_size=2, num_stages=2):
        torch.testing.assert_close(answer.logits, oracle.logits(oracle.prompts[4]), atol=1e-4, rtol=0)


def test_the_engine_gives_its_greedy_tokens(oracle: Oracle, registry: Registry) -> None:
    engine = Engine.build(options(oracle, max_batch_tokens=16), registry)
    assert_greedy(oracle, generate(engine, oracle.prompts[3:5]), oracle.prompts[3:5])


def test_half_precision_stays_close(oracle: Oracle, registry: Registry) -> None:
    assert rounding_error(oracle, registry) < 0.04


# As the hub has it, where transformers 5 writes `rope_parameters`.
HUB = {
    "ministral": dict(architectures=["MistralForCausalLM"], model_type="mistral"),
    "phi3-long": dict(rope_scaling=dict(type="su", **FACTORS_OF_ROPE), rope_theta=1e4, partial_rotary_factor=0.5),
    "smollm3": dict(rope_theta=2e6, no_rope_layer_interval=4),
}


@pytest.mark.parametrize("name", sorted(HUB))
def test_files_of_the_hub_mean_the_same(write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path, name: str) -> None:
    oracle = write_oracle(name, RELATIVES[name])
    asked, prompt = options(oracle), oracle.prompts[4]
    copy = oracle.copied(tmp_path / "hub", without=("rope_parameters", "no_rope_layers"), **HUB[name])
    answers = [last_logits(registry, each, prompt) for each in (asked, dataclasses.replace(asked, model=copy))]
    torch.testing.assert_close(*answers, atol=0, rtol=0)


@pytest.mark.parametrize("given", [[1, 0], [1, 0, 2, 1]])
def test_layers_without_positions_are_told_by_0_and_1(given: list[int]) -> None:
    (spec,) = (spec for spec in enginery_model_llama.register_models() if spec.name == "smollm3")
    config = {**shape(), "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": given}
    with pytest.raises(CheckpointError, match=r"no_rope_layers .* it needs 0 or 1 for each of 4 layers"):
        spec.describe({**config, "use_sliding_window": True, "sliding_window": 8})
