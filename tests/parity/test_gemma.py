"""Gemma 1, 2 and 3, made of the core's blocks alone, equal transformers: on one rank and several, and in the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parity.engine_driver import CUT_UP, assert_cut_up, assert_greedy, generate, last_logits, options, rounding_error
from parity.oracle import Oracle, shape
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, GemmaConfig

import enginery_model_gemma
from enginery.checkpoint.files import scan_checkpoint
from enginery.config.schema import EngineOptions
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.testing.kits.ranks import RankAnswer, RankThreads, ThreadCollectives
from enginery.testing.kits.weights import WholeTensors

SIZES = dict(head_dim=16, sliding_window=16, query_pre_attn_scalar=24)
KINDS = ["sliding_attention", "full_attention"] * 2
GEMMAS = {
    "gemma": GemmaConfig(**shape(head_dim=24, hidden_act="gelu")),
    "gemma2": Gemma2Config(**shape(**SIZES, layer_types=KINDS, attn_logit_softcapping=5.0, final_logit_softcapping=3.0)),
    "gemma3": Gemma3TextConfig(**shape(**SIZES, layer_types=KINDS)),
}


@pytest.fixture(params=sorted(GEMMAS))
def oracle(request: pytest.FixtureRequest, write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle(request.param, GEMMAS[request.param])


def run(oracle: Oracle, *, tensor_size: int = 1, num_stages: int = 1) -> list[RankAnswer]:
    (family,) = (spec for spec in enginery_model_gemma.register_models() if type(oracle.model).__name__ in spec.architectures)
    config = {**oracle.model.config.to_dict(), "architectures": [type(oracle.model).__name__]}
    tensors = WholeTensors({name: tensor.detach() for name, tensor in oracle.model.state_dict().items()}, torch.float32)
    ranks = RankThreads(family=family, config=config, tensors=tensors, tensor_size=tensor_size, num_stages=num_stages)
    return ranks.run(oracle.prompts[4])


def test_the_blocks_give_transformers_logits(oracle: Oracle) -> None:
    (answer,) = run(oracle)
    torch.testing.assert_close(answer.logits, oracle.logits(oracle.prompts[4]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_sums_that_are_normed_by_themselves_begin_behind_products(
    write_oracle: Callable[..., Oracle], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr(ThreadCollectives, "summed_early")
    run(write_oracle(name, GEMMAS[name]), tensor_size=2)


@pytest.mark.parametrize("tensor_size", [2, 4])
def test_so_do_several_ranks_and_stages(oracle: Oracle, tensor_size: int) -> None:
    for answer in run(oracle, tensor_size=tensor_size, num_stages=2):
        torch.testing.assert_close(answer.logits, oracle.logits(oracle.prompts[4]), atol=1e-4, rtol=0)


def test_the_engine_gives_its_greedy_tokens(oracle: Oracle, registry: Registry) -> None:
    engine = Engine.build(options(oracle, max_batch_tokens=16), registry)
    assert_greedy(oracle, generate(engine, oracle.prompts[3:5]), oracle.prompts[3:5])


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
@pytest.mark.parametrize("changes", CUT_UP, ids=str)
def test_greedy_tokens_are_transformers_however_the_work_is_cut_up(
    write_oracle: Callable[..., Oracle], registry: Registry, name: str, changes: dict[str, object]
) -> None:
    assert_cut_up(write_oracle(name, GEMMAS[name]), registry, changes)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_cached_prompt_gives_the_same_tokens(write_oracle: Callable[..., Oracle], registry: Registry, name: str) -> None:
    oracle = write_oracle(name, GEMMAS[name])
    engine, prompts = Engine.build(options(oracle, page_size=16), registry), oracle.prompts[4:6]
    for _ in range(3):
        assert_greedy(oracle, generate(engine, prompts), prompts)


LAYOUTS = {
    "the hub's": ("language_model.model.", ""),
    "transformers 4.52's": ("model.language_model.", "model."),
    "of text alone": ("model.", ""),
}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_of_a_model_for_images_the_text_is_served(registry: Registry, tmp_path: Path, layout: str) -> None:
    """In the hub's names, which transformers writes, and in others; what is of images, and a head of its own, is not read."""
    text = GEMMAS["gemma3"].to_dict()
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    config = Gemma3Config(text_config=text, vision_config=sizes, mm_tokens_per_image=4, image_token_index=text["vocab_size"] - 1)
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    (text_stem, images_stem), hubs, file = LAYOUTS[layout], "language_model.model.", tmp_path / "model.safetensors"
    stored = load_file(file)
    renamed = {
        name.replace(hubs, text_stem) if name.startswith(hubs) else images_stem + name: tensor for name, tensor in stored.items()
    }
    save_file(renamed | {"lm_head.weight": stored[f"{hubs}embed_tokens.weight"].clone()}, file)
    prompt = list(range(5, 45))
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0, -1]
    asked = EngineOptions(model=str(tmp_path), dtype="float32", device="cpu", num_pages=200)
    torch.testing.assert_close(last_logits(registry, asked, prompt), wanted, atol=1e-4, rtol=0)


def gemma_beside_images(folder: Path, *, tied: bool) -> Gemma3ForConditionalGeneration:
    """Written as transformers writes it, in the hub's names."""
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    text = GEMMAS["gemma3"].to_dict() | {"tie_word_embeddings": tied}
    config = Gemma3Config(text_config=text, vision_config=sizes, mm_tokens_per_image=4, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("said", [{"text": False, "outer": False}, {"text": True, "outer": True}, {"outer": False}])
def test_a_head_that_was_trained_beside_the_embedding_is_the_head(
    registry: Registry, tmp_path: Path, said: dict[str, bool]
) -> None:
    """Its name is `language_model.lm_head` on the hub. Where it is said to be tied, it is untied by its values."""
    gemma_beside_images(tmp_path, tied=False)
    assert "language_model.lm_head.weight" in scan_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for part, key in ((config, "outer"), (config["text_config"], "text")):
        del part["tie_word_embeddings"]
        part |= {"tie_word_embeddings": said[key]} if key in said else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = list(range(5, 45))
    with torch.inference_mode():
        wanted = Gemma3ForConditionalGeneration.from_pretrained(tmp_path).eval()(torch.tensor([prompt])).logits[0, -1]
    asked = EngineOptions(model=str(tmp_path), dtype="float32", device="cpu", num_pages=200)
    torch.testing.assert_close(last_logits(registry, asked, prompt), wanted, atol=1e-4, rtol=0)


def test_half_precision_stays_close(oracle: Oracle, registry: Registry) -> None:
    """1 + w is rounded when it is read, and in transformers when it is used."""
    assert rounding_error(oracle, registry) < 0.04
