"""Families whose files may hold the head though it is the embedding: it is left out where it is, missed where it is not and taken
where it has other values.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parity import test_gemma, test_hybrids, test_llama_relatives, test_mamba
from parity.engine_driver import assert_last_logits, assert_ranks, drain, greedy, options
from parity.oracle import FAMILIES as EVERY_FAMILY
from parity.oracle import NUM_GREEDY, Oracle
from safetensors.torch import load_file, save_file, save_model

from enginery.checkpoint.files import scan_checkpoint
from enginery.contracts.parallel import ParallelFacts
from enginery.engine.engine import Engine
from enginery.errors import CheckpointError
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose
from enginery.worker.drafts.parts import choose_draft_model

FAMILIES = {
    "gemma2": test_gemma.GEMMAS["gemma2"],
    "lfm2": test_mamba.FAMILIES["lfm2"],
    "qwen3_5": test_hybrids.HYBRIDS["qwen3_5"],
    "smollm3": test_llama_relatives.RELATIVES["smollm3-yarn"],
}
TIES = ("tie_word_embeddings", "tie_embedding")


def written(config: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """As files of the hub say it: Qwen3.5's of the text, the others' not at all where they are tied."""
    if config["model_type"].startswith("qwen"):
        text = config | {"tie_word_embeddings": tied}
        return {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    plain = {key: value for key, value in config.items() if key not in TIES}
    return plain if tied else plain | dict.fromkeys(TIES, False)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_head_that_is_the_embedding_is_left_out_and_any_other_is_missed(
    write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path, name: str
) -> None:
    oracle = write_oracle(name, FAMILIES[name])
    config, tensors = json.loads((oracle.folder / "config.json").read_text()), load_file(oracle.folder / "model.safetensors")

    def build(*, tied: bool, has_head: bool) -> None:
        stored = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        if not has_head:
            del stored["lm_head.weight"]
        save_file(stored, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(written(config, tied=tied)))
        Engine.build(options(oracle, model=str(tmp_path)), registry).close()

    build(tied=True, has_head=True)
    build(tied=False, has_head=True)
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' .* is missing"):
        build(tied=False, has_head=False)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_stored_head_that_is_not_the_embedding_is_the_head_as_in_transformers(
    write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path, name: str
) -> None:
    """Whatever config.json says."""
    oracle = write_oracle(name, FAMILIES[name])
    config, tensors = json.loads((oracle.folder / "config.json").read_text()), load_file(oracle.folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(written(config, tied=True)))
    tied = type(oracle.model.config)(**config | dict.fromkeys(TIES, True))
    reference = Oracle(tmp_path, type(oracle.model).from_pretrained(tmp_path, config=tied).eval())
    prompt = reference.prompts[1]
    engine = Engine.build(options(oracle, model=str(tmp_path)), registry)
    try:
        engine.submit(greedy("a", prompt))
        (found,) = drain(engine, {}).values()
    finally:
        engine.close()
    assert found == reference.continue_greedily(prompt, NUM_GREEDY, found)
    assert found != oracle.continue_greedily(prompt, NUM_GREEDY, found)


ONE_NAME = {
    "llama-tied": EVERY_FAMILY["llama-tied"],
    "lfm2": test_mamba.FAMILIES["lfm2"],
    "phi3-long": test_llama_relatives.RELATIVES["phi3-long"],  # of which another matrix has the embedding's shape
}


@pytest.mark.parametrize("name", sorted(ONE_NAME))
def test_an_embedding_that_is_stored_as_the_head_alone_is_found(
    write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """As accelerate's `save_model` leaves a tied one."""
    oracle = write_oracle(name, ONE_NAME[name])
    shutil.copy(oracle.folder / "config.json", tmp_path)
    save_model(oracle.model, str(tmp_path / "model.safetensors"))
    assert {"lm_head.weight", "model.embed_tokens.weight"} & scan_checkpoint(tmp_path).keys() == {"lm_head.weight"}
    copy = Oracle(tmp_path, oracle.model)
    assert_last_logits(copy, registry, oracle.prompts[1:2])
    assert_ranks(copy, oracle.prompts[1], tensor_size=2, num_stages=2)
    assert not any("is not the embedding" in told for told in caplog.messages)


def test_a_model_without_a_head_has_shorter_names(write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path) -> None:
    """As models that embed are stored, Qwen3-Embedding too, of which config.json names the class with a head."""
    oracle = write_oracle("llama-tied", EVERY_FAMILY["llama-tied"])
    oracle.model.model.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in scan_checkpoint(tmp_path)
    shutil.copy(oracle.folder / "config.json", tmp_path)
    copy = Oracle(tmp_path, oracle.model)
    assert_last_logits(copy, registry, oracle.prompts[1:2])
    assert_ranks(copy, oracle.prompts[1], tensor_size=2, num_stages=2)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5"])
def test_beside_a_model_for_images_the_outer_tie_is_the_heads(
    write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path, name: str
) -> None:
    """transformers 5 writes both, and the inner one by its default where only the outer one was known."""
    text = test_gemma.GEMMAS[name] if name == "gemma3" else test_hybrids.HYBRIDS[name]
    config = {**text.to_dict(), "tie_word_embeddings": True}
    oracle = write_oracle(f"{name}-tied", type(text)(**config))
    stated = json.loads((oracle.folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    whole = {"gemma3": "Gemma3ForConditionalGeneration", "qwen3_5": "Qwen3_5ForConditionalGeneration"}[name]
    outer = {"architectures": [whole], "tie_word_embeddings": True, "text_config": stated}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    (tmp_path / "model.safetensors").symlink_to(oracle.folder / "model.safetensors")
    assert_last_logits(Oracle(tmp_path, oracle.model), registry, oracle.prompts[1:2])


def write_untied(oracle: Oracle, folder: Path) -> str:
    """Where its files are beside a config.json that ties its head."""
    config = json.loads((oracle.folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    (folder / "model.safetensors").symlink_to(oracle.folder / "model.safetensors")
    return str(folder)


def test_one_rank_says_for_all_that_the_head_is_not_tied(
    write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = write_oracle("llama", EVERY_FAMILY["llama"])
    asked = options(oracle, model=write_untied(oracle, tmp_path))
    for rank in range(2):
        choice = choose(asked, registry, parallel=ParallelFacts(tensor_size=2).of_rank(rank))
        assert choice.checkpoint.config["tie_word_embeddings"] is False
    assert ["is not the embedding" in told for told in caplog.messages].count(True) == 1


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_model_that_drafts_has_its_own_head_too(
    write_oracle: Callable[..., Oracle], registry: Registry, tmp_path: Path, load_format: str
) -> None:
    oracle = write_oracle("llama", EVERY_FAMILY["llama"])
    draft = write_untied(oracle, tmp_path)
    asked = options(oracle, drafter="standalone", draft_model=draft, load_format=load_format)
    drafts = choose_draft_model(asked, registry, choose(asked, registry))
    assert drafts is not None
    assert drafts.checkpoint.config["tie_word_embeddings"] is (load_format == "dummy")
