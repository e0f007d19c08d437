"""config.json as the hub has them: every family reads its own, and asks for as many parameters as the model has.

hub_configs.json has what matters of them. Its numbers are of the text model, without modules for further tokens: those that model
cards state, as far as these are exact, and what transformers counts for the same config.json, with the biases of routers, which it
has as buffers. They were compared once, by hand; here nothing is looked up. Shapes of `engine bench` are such files too.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from enginery.bench.workloads import shapes
from enginery.contracts.model import ModelSpec
from enginery.errors import CheckpointError
from enginery.plugin.registry import Registry
from enginery.worker.weights.needed_weights import needed_weights

HUB: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("hub_configs.json").read_text())
OF_SHAPES = {
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
    "deepseek-v2-lite": 15_706_484_224,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-oss-120b": 116_829_156_672,
    "kimi-linear-48b": 49_122_681_728,
}
CASES = [(name, each["config"], each["parameters"]) for name, each in HUB.items()] + [
    (name, shapes()[name], count) for name, count in OF_SHAPES.items()
]


def parameters(family: ModelSpec, config: dict[str, Any]) -> int:
    """Numbers in all tensors that the family asks for. A tied head is the embedding."""
    pieces = needed_weights(family, config, torch.bfloat16).pieces
    sizes = {part.name: math.prod(part.whole) for piece in pieces for part in piece.slices}
    return sum(sizes.values())


@pytest.mark.parametrize(("config", "count"), [pytest.param(*each, id=name) for name, *each in CASES])
def test_a_model_of_the_hub_has_its_parameters(registry: Registry, config: dict[str, Any], count: int) -> None:
    offer, _ = registry.find_model(config)
    assert parameters(offer.spec, config) == count


@pytest.mark.parametrize(("config", "count"), [pytest.param(*each, id=name) for name, *each in CASES if "Mamba-" not in name])
def test_attention_in_both_directions_is_refused(registry: Registry, config: dict[str, Any], count: int) -> None:
    """As gte-Qwen2 has it, whose config.json names the class with a head. Of Mamba2 no layer has attention."""
    offer, _ = registry.find_model(config)
    text = {"text_config": {**config["text_config"], "is_causal": False}} if "text_config" in config else {"is_causal": False}
    with pytest.raises(CheckpointError, match="is_causal False; this architecture is served with True only"):
        offer.spec.describe(config | text)


def test_every_family_has_a_model_of_the_hub_here(registry: Registry) -> None:
    seen = {name for _, config, _ in CASES for name in config["architectures"]}
    without = {offer.name for offer in registry.offers(ModelSpec) if not set(offer.spec.architectures) & seen}
    assert without == {"echo", "ring-2.5"}  # of Ring-2.5 no config.json was at hand
