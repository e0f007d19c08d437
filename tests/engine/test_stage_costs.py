"""Pipeline stages have layers by what these cost: of models whose layers differ, and by every way to divide them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import noise
import pytest
import torch
from engine.rank_models import CONFIGS
from transformers import DeepseekV3Config

from enginery.config.schema import EngineOptions
from enginery.contracts.parallel import ParallelFacts
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose
from enginery.worker.weights.needed_weights import needed_weights
from enginery.worker.weights.stage_costs import LayerCost, divide, largest_shares, layer_costs


def costs_of(registry: Registry, config: dict[str, Any]) -> list[LayerCost]:
    offer, _ = registry.find_model(config)
    return layer_costs(offer.spec, config, torch.bfloat16, kept={})


def divided(costs: list[LayerCost], num_stages: int) -> tuple[int, ...] | None:
    return divide(costs, num_stages, [True] * len(costs))


DENSE, SPARSE = LayerCost(held=10, token=10), LayerCost(held=200, token=10)
HEAD, EMBEDDING = LayerCost(held=60, token=60), LayerCost(held=60, token=10)


@pytest.mark.parametrize(
    ("costs", "stages", "sizes"),
    [
        ([DENSE] * 6, 2, (3, 3)),
        ([DENSE] * 7, 3, (3, 2, 2)),
        ([DENSE] * 4 + [SPARSE] * 4, 2, (5, 3)),  # evenly for a token, and not for memory: between the two
        ([DENSE] * 11 + [HEAD], 2, (8, 4)),
        ([EMBEDDING, *[DENSE] * 10, HEAD], 2, (7, 5)),
        ([DENSE] * 3 + [HEAD], 2, (3, 1)),
        ([DENSE, LayerCost(held=30, token=30)] * 4, 4, (2, 2, 2, 2)),
        ([LayerCost(held=0, token=0)] * 4, 2, (2, 2)),
    ],
)
def test_the_largest_stage_is_as_small_as_can_be(costs: list[LayerCost], stages: int, sizes: tuple[int, ...]) -> None:
    assert divided(costs, stages) == sizes


def test_no_way_to_divide_them_has_a_smaller_largest_stage() -> None:
    """Against every way, of layers by chance, some of which have no memory."""
    chance = random.Random(0)
    for _ in range(60):
        count = chance.randint(3, 8)
        stages = chance.randint(2, min(4, count))
        costs = [LayerCost(chance.randint(1, 50), chance.randint(1, 50)) for _ in range(count)]
        memory = [chance.random() < 0.7 for _ in costs]
        ways = []
        for ends in itertools.combinations(range(1, count), stages - 1):
            places = list(itertools.pairwise((0, *ends, count)))
            if all(any(memory[first:stop]) for first, stop in places):
                ways.append(tuple(stop - first for first, stop in places))
        sizes = divide(costs, stages, memory)
        assert (sizes is None) == (not ways)
        if sizes is not None:
            assert sizes in ways
            plus_one = [LayerCost(cost.held + 1, cost.token + 1) for cost in costs]
            assert max(largest_shares(plus_one, sizes)) == min(max(largest_shares(plus_one, way)) for way in ways)


def test_dense_layers_before_experts_count_for_less(registry: Registry) -> None:
    config = DeepseekV3Config().to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    costs = costs_of(registry, config)
    assert costs[1] == costs[2]
    assert costs[3] == costs[59]
    assert costs[3].held > 15 * costs[1].held
    assert costs[3].token < 1.1 * costs[1].token, "a token has nine of 257 experts"
    assert costs[0].held - costs[1].held == costs[0].token - costs[1].token + 2 * 129280 * 7168, "an embedding is looked up"
    assert costs[60].token - costs[59].token == 129280 * 7168, "the head"
    offer, _ = registry.find_model(config)
    assert sum(cost.held for cost in costs) == needed_weights(offer.spec, config, torch.bfloat16).num_bytes()
    assert divided(costs, 2) == (32, 29)
    assert max(largest_shares(costs, (32, 29))) < max(largest_shares(costs, (31, 30)))


@pytest.mark.parametrize(
    "name", ["bamba", "falcon_h1", "gpt-oss", "jamba", "kimi_linear", "lfm2", "longcat-flash", "nemotron_h_moe", "qwen3_next"]
)
def test_layers_of_every_kind_are_counted_once(name: str, registry: Registry) -> None:
    """Built one by one they ask for what all together do, but for norms behind the last one and tied embeddings."""
    config = CONFIGS[name]
    costs, (offer, _) = costs_of(registry, config), registry.find_model(config)
    facts = offer.spec.describe(config)
    assert len(costs) == facts.num_decoder_layers
    tied = 2 * facts.vocab_size * facts.hidden_size if config.get("tie_word_embeddings") else 0
    assert sum(cost.held for cost in costs) == needed_weights(offer.spec, config, torch.bfloat16).num_bytes() + tied


def test_a_large_head_takes_layers_from_the_last_stage(registry: Registry) -> None:
    costs = costs_of(registry, CONFIGS["llama"] | {"num_hidden_layers": 12, "vocab_size": 4096})
    sizes = divided(costs, 2)
    assert sizes is not None
    assert sizes[1] < 6
    assert max(largest_shares(costs, sizes)) < max(largest_shares(costs, (6, 6)))


def stages_decided(registry: Registry, **asked: object) -> tuple[ParallelFacts, dict[str, tuple[str, str]]]:
    parallel = ParallelFacts(num_stages=2, layers_by_stage=asked.pop("layers", ()))
    options = EngineOptions(**{**noise.OPTIONS, "device": "cpu", "dtype": "float32", **asked})
    choice = choose(options, registry, parallel=parallel)
    return choice.parallel, {made.setting: (made.value, made.reason) for made in choice.decisions}


def test_the_decision_says_how_they_are_divided(registry: Registry) -> None:
    parallel, decided = stages_decided(registry)
    assert sum(parallel.layers_by_stage) == 4
    value, reason = decided["stages"]
    assert value == f"{', '.join(map(str, parallel.layers_by_stage))} layers"
    assert "of the weights and" in reason
    assert "--pp-layers divides otherwise" in reason


def test_what_is_asked_for_is_kept(registry: Registry) -> None:
    parallel, decided = stages_decided(registry, layers=(3, 1))
    assert parallel.layers_by_stage == (3, 1)
    assert decided["stages"] == ("3, 1 layers", "asked for")
