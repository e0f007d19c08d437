"""Values narrower than keys, through the engine: as values that are as wide with zeros behind, which transformers computes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from installed import install
from pairwise import pairwise
from parity.engine_driver import assert_greedy, generate, options
from parity.oracle import Oracle, randomise, shape
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from enginery.api import LocalLayerId, Model, ModelContext, ModelFacts, ModelSpec, hookimpl
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.errors import Unsupported
from enginery.plugin.registry import Registry
from enginery_model_llama.model import build_decoder
from enginery_model_llama.spec import describe


def describe_narrow(config: Mapping[str, Any]) -> ModelFacts:
    facts = describe(config)
    layers = tuple(dataclasses.replace(layer, v_head_dim=config["v_head_dim"]) for layer in facts.layers)
    return dataclasses.replace(facts, layers=layers)


def build(context: ModelContext) -> Model:
    return build_decoder(context)


@hookimpl
def register_models() -> list[ModelSpec]:
    """This module as a plugin."""
    return [ModelSpec(name="narrow", api=(2, 0), architectures=("NarrowForCausalLM",), describe=describe_narrow, build=build)]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    site = tmp_path_factory.mktemp("site")
    install(site, "enginery-narrow", "engine.test_unequal_values", name="narrow")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield Registry.load()


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """The folder has 10 dims of a value; the model of transformers all of them, of which the others are zero."""
    value_dim = 10
    model = LlamaForCausalLM(LlamaConfig(**shape())).eval().float()
    randomise(model)
    config = model.config
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, tensor in tensors.items():
        if "v_proj.weight" in name:
            rows = tensor.view(config.num_key_value_heads, config.head_dim, -1)
            rows[:, value_dim:] = 0
            tensors[name] = rows[:, :value_dim].flatten(0, 1).contiguous()
        elif "o_proj.weight" in name:
            rows = tensor.view(-1, config.num_attention_heads, config.head_dim)
            tensors[name] = rows[..., :value_dim].flatten(1).contiguous()
    folder = tmp_path_factory.mktemp("narrow")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stated = {**config.to_dict(), "architectures": ["NarrowForCausalLM"], "v_head_dim": value_dim}
    (folder / "config.json").write_text(json.dumps(stated))
    return Oracle(folder, model)


@pairwise(("page_size", [1, 16]), ("chunk", [16, 4096]), ("batch", [1, 7]), ("micro_batches", [False, True]))
def test_greedy_tokens_are_those_of_the_wide_model(
    narrow: Oracle, registry: Registry, *, page_size: int, chunk: int, batch: int, micro_batches: bool
) -> None:
    asked = options(narrow, page_size=page_size, num_pages=6400 // page_size, max_batch_tokens=chunk, micro_batches=micro_batches)
    prompts = narrow.prompts[:batch]
    assert_greedy(narrow, generate(Engine.build(asked, registry), prompts), prompts)


def test_memory_is_of_the_width_that_values_have_and_who_cannot_do_it_refuses(narrow: Oracle, registry: Registry) -> None:
    parts = build_parts(options(narrow, attention_backend="torch"), registry)
    keys, values = parts.step.relay.backend.pool.layer(LocalLayerId(0))
    assert (keys.shape[-1], values.shape[-1]) == (16, 10)
    with pytest.raises(Unsupported, match="values of another width than keys"):
        build_parts(options(narrow, attention_backend="flashinfer"), registry)
