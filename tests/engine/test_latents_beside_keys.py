"""Latents beside keys and values, of all tokens and of windows, in one model. What is right, transformers says: layers of its
DeepSeek-V3 have its Llama's attention."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.rank_threads import on_threads
from engine.test_speculation import ASKS
from engine.test_trees import assert_equal_answers, requests_of
from installed import install
from pairwise import pairwise
from parity.engine_driver import assert_greedy, assert_last_logits, generate, options
from parity.oracle import Oracle, latent_shape, randomise, shape
from safetensors.torch import save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from enginery.api import (
    AttnLayerFacts,
    DecoderShape,
    Model,
    ModelContext,
    ModelFacts,
    ModelSpec,
    WeightSource,
    hookimpl,
)
from enginery.contracts.batch import WINDOW
from enginery.engine.engine import Engine
from enginery.errors import Unsupported
from enginery.nn.attention import SelfAttention
from enginery.nn.decoder import Decoder, DecoderLayer, dense_mlp
from enginery.nn.latent_attention import LatentSelfAttention
from enginery.plugin.registry import Registry
from enginery_model_deepseek.model import LATENT_NORM_EPS
from enginery_model_deepseek.spec import DeepseekShape
from enginery_model_deepseek.spec import shape as deepseek_shape

WINDOWS: dict[str, list[int | None]] = {"windows": [None, 12], "no windows": [None, None]}  # of layers 1 and 2, which have keys
HEAD_DIM = 16


def read(config: Mapping[str, Any]) -> DeepseekShape:
    return deepseek_shape({**config, "architectures": ["DeepseekV3ForCausalLM"]})


def describe(config: Mapping[str, Any]) -> ModelFacts:
    facts = read(config).facts()
    layers = [dataclasses.replace(layer, sliding_window=config.get("latent_window")) for layer in facts.layers]
    for index, window in enumerate(config["windows"], 1):
        keys = AttnLayerFacts(num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, sliding_window=window)
        layers[index] = dataclasses.replace(keys, decoder_layer=index)
    return dataclasses.replace(facts, layers=tuple(layers))


def layer(
    context: ModelContext, weights: WeightSource, *, shape: DecoderShape, index: int, deepseek: DeepseekShape
) -> DecoderLayer:
    own, latent = weights.scope("self_attn"), context.facts.layers[index].latent
    spec = context.stage.spec(index, scale=HEAD_DIM**-0.5 if latent is None else deepseek.scale)
    attention = (
        SelfAttention(context, own, spec=spec, qkv_bias=False, out_bias=False, qk_norm_eps=None)
        if latent is None
        else LatentSelfAttention(context, own, spec=spec, q_rank=None, bias=False, norm_eps=LATENT_NORM_EPS)
    )
    return DecoderLayer(context, weights, shape=shape, attention=attention, mlp=dense_mlp(context, weights, shape=shape))


def build(context: ModelContext) -> Model:
    deepseek = read(context.config)
    return Decoder(context, deepseek.decoder, layer=partial(layer, deepseek=deepseek))


@hookimpl
def register_models() -> list[ModelSpec]:
    """This module as a plugin."""
    return [ModelSpec(name="beside", api=(2, 0), architectures=("BesideForCausalLM",), describe=describe, build=build)]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    site = tmp_path_factory.mktemp("site")
    install(site, "enginery-beside", "engine.test_latents_beside_keys", name="beside")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield Registry.load()


def seeing(window: int | None) -> Any:
    """A hook of transformers' attention, which is given no mask otherwise than for whole prompts: causal, and of a window."""

    def mask(module: object, args: object, kwargs: dict[str, Any]) -> tuple[object, dict[str, Any]]:
        places = torch.arange(kwargs["hidden_states"].shape[1])
        ago = places[:, None] - places
        seen = (ago >= 0) & (ago < (window or len(places)))
        return args, kwargs | {"attention_mask": torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]}

    return mask


def written(folder: Path, windows: list[int | None]) -> Oracle:
    config = DeepseekV3Config(**latent_shape(q_lora_rank=None) | {"qk_rope_head_dim": HEAD_DIM})
    model = DeepseekV3ForCausalLM(config).eval().float()
    plain = LlamaConfig(**shape(head_dim=HEAD_DIM), attn_implementation="eager")
    for index, window in enumerate(windows, 1):
        attention = LlamaAttention(plain, index)
        attention.register_forward_pre_hook(seeing(window), with_kwargs=True)
        model.model.layers[index].self_attn = attention
    randomise(model)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    stated = {**config.to_dict(), "architectures": ["BesideForCausalLM"], "windows": windows}
    (folder / "config.json").write_text(json.dumps(stated))
    return Oracle(folder, model)


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return written(tmp_path_factory.mktemp("beside"), WINDOWS["windows"])


@pytest.mark.parametrize("max_model_len", [500, 12])
def test_logits_are_transformers_whether_windows_have_pages_of_their_own_or_not(
    beside: Oracle, registry: Registry, max_model_len: int
) -> None:
    prompts = [prompt for prompt in beside.prompts if len(prompt) < max_model_len]
    assert_last_logits(beside, registry, prompts, max_model_len=max_model_len)


@pairwise(
    ("mla_prefill", ["auto", "one-shot", "chunked"]),
    ("chunk", [16, 4096]),
    ("num_tokens", [128, 1600]),
    ("micro_batches", [False, True]),
)
def test_greedy_tokens_are_transformers_again_from_the_cache(
    beside: Oracle, registry: Registry, *, mla_prefill: str, chunk: int, num_tokens: int, micro_batches: bool
) -> None:
    pages = {"page_size": 4, "num_pages": num_tokens // 4}
    asked = options(beside, max_batch_tokens=chunk, micro_batches=micro_batches, mla_prefill=mla_prefill, num_threads=1, **pages)
    engine = Engine.build(asked, registry)
    for _ in range(2):
        assert_greedy(beside, generate(engine, beside.prompts))
    assert WINDOW in engine.meter.stats().pages


@pytest.mark.parametrize(("kind", "micro_batches"), [("right", False), ("comb", True)])
def test_guesses_that_branch_are_masked_in_both_kinds_of_layers(
    registry: Registry, tmp_path: Path, kind: str, micro_batches: bool
) -> None:
    oracle = written(tmp_path, WINDOWS["no windows"])
    asked = options(oracle, page_size=4, max_batch_tokens=48, micro_batches=micro_batches)
    asks = {about: ASKS[about] for about in list(ASKS)[:4]}
    assert_equal_answers(registry, asked, requests_of(oracle, asks), kind)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}])
def test_several_ranks_have_the_same_tokens(beside: Oracle, registry: Registry, mesh: dict[str, int]) -> None:
    with on_threads(options(beside, **mesh), registry) as (engine, _):
        assert_greedy(beside, generate(engine, beside.prompts))


def test_latents_of_windows_that_contexts_outgrow_are_refused_at_the_start(registry: Registry, tmp_path: Path) -> None:
    oracle = written(tmp_path, WINDOWS["no windows"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"latent_window": 12}))
    with pytest.raises(Unsupported, match="MLA in windows that contexts outgrow: no backend plans latents of windows"):
        Engine.build(options(oracle), registry)
