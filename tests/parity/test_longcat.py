"""LongCat-Flash equals transformers from its files as they are stored, and however little memory its two attentions a layer have.

What it has in common with other mixtures and latents is in test_moe_parity.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pairwise import EVERYTHING, spread
from parity.engine_driver import assert_cut_up, assert_greedy, assert_last_logits, generate, last_logits, options
from parity.oracle import EXPERT_FAMILIES, Oracle, longcat_shape
from safetensors.torch import load_file, save_file
from transformers import LongcatFlashConfig

from enginery.checkpoint.files import scan_checkpoint
from enginery.config.schema import EngineOptions
from enginery.engine.engine import Engine
from enginery.errors import CheckpointError
from enginery.plugin.registry import Registry
from enginery.worker.choice import choose
from enginery.worker.loading import check_weights

FAMILY = "longcat-flash"
YARN = dict(rope_type="yarn", rope_theta=1e5, factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.9)
UNUSED = ("experts.8.", "experts.9.", "experts.10.")  # what transformers stores of zero experts


@pytest.fixture
def oracle(write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle(FAMILY, EXPERT_FAMILIES[FAMILY])


def write_hub(oracle: Oracle, folder: Path) -> dict[str, torch.Tensor]:
    """The hub's layout: zero experts have no tensors, a layer behind the last has some, and config.json has older keys."""
    weights = {
        name: each for name, each in load_file(oracle.folder / "model.safetensors").items() if not any(map(name.count, UNUSED))
    }
    weights |= {"model.mtp.layers.0.eh_proj.weight": torch.zeros(4, 8), "model.mtp.norm.weight": torch.zeros(4)}
    save_file(weights, folder / "model.safetensors")
    config = json.loads((oracle.folder / "config.json").read_text())
    for key in ("head_dim", "qk_head_dim", "num_key_value_heads", "hidden_act", "dtype"):
        config.pop(key, None)
    config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "torch_dtype": "float32", "attention_method": "MLA"}
    config |= {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "router_bias": False, "zero_expert_type": "identity"}
    (folder / "config.json").write_text(json.dumps(config))
    return weights


def test_the_hubs_files_are_read(oracle: Oracle, registry: Registry, tmp_path: Path) -> None:
    stored = scan_checkpoint(oracle.folder)
    assert "model.layers.1.mlp.experts.10.gate_proj.weight" in stored
    assert "model.layers.1.mlp.experts.10.down_proj.weight" not in stored
    write_hub(oracle, tmp_path)
    assert_last_logits(oracle, registry, oracle.prompts[4:5], model=str(tmp_path))


def test_scales_of_what_zero_experts_never_use_are_left_out(oracle: Oracle, registry: Registry, tmp_path: Path) -> None:
    """As files in float8 have them beside each weight."""
    weights = load_file(oracle.folder / "model.safetensors")
    of_zero = [name for name in weights if any(map(name.count, UNUSED))]
    save_file(weights | {f"{name}_scale_inv": torch.ones(1, 1) for name in of_zero}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((oracle.folder / "config.json").read_bytes())
    assert of_zero
    assert_last_logits(oracle, registry, oracle.prompts[:1], model=str(tmp_path))


def test_experts_that_transformers_stored_in_one_piece_are_read(oracle: Oracle, registry: Registry, tmp_path: Path) -> None:
    oracle.model.save_pretrained(tmp_path, save_original_format=False)
    stored = scan_checkpoint(tmp_path)
    assert stored["model.layers.0.mlp.experts.gate_up_proj"].shape == (11, 64, 64)
    assert stored["model.layers.0.mlp.experts.down_proj"].shape == (8, 64, 32)
    assert_last_logits(oracle, registry, oracle.prompts[4:5], model=str(tmp_path))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"n_routed_experts": 7, "zero_expert_num": 4}, r"experts\.7\.down_proj\.weight.*unexpected"),
        ({"zero_expert_num": 2}, r"router\.classifier\.weight.*has shape \[11, 64\]"),
        ({"num_layers": 1}, r"layers\.1\..*unexpected"),
    ],
    ids=str,
)
def test_files_that_do_not_fit_their_config_are_refused(
    oracle: Oracle, registry: Registry, tmp_path: Path, changed: dict[str, int], said: str
) -> None:
    write_hub(oracle, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(CheckpointError, match=said):
        Engine.build(options(oracle, model=str(tmp_path)), registry)


CUTS: list[dict[str, object]] = [
    {"num_pages": 12, "page_size": 16},
    {"num_pages": 150, "page_size": 1, "max_batch_tokens": 7},
    {"max_batch_requests": 2},
    {"overlap": True, "max_batch_tokens": 16},
]
TOGETHER: list[dict[str, object]] = [
    {"num_pages": 150, "page_size": 1, "max_batch_tokens": 7, "overlap": True},
    {"num_pages": 12, "page_size": 16, "max_batch_requests": 3},
]  # on a CPU several at once


@pytest.mark.parametrize("changes", CUTS if EVERYTHING else TOGETHER, ids=str)
def test_greedy_tokens_are_transformers_however_the_work_is_cut_up(
    oracle: Oracle, registry: Registry, changes: dict[str, object]
) -> None:
    assert_cut_up(oracle, registry, changes)


def test_a_token_needs_two_rows_of_memory_for_each_decoder_layer(oracle: Oracle, registry: Registry) -> None:
    facts = choose(options(oracle), registry).facts
    assert [layer.decoder_layer for layer in facts.layers] == [0, 0, 1, 1]


CHANGED = {
    "yarn-biases": dict(rope_parameters=YARN, attention_bias=True),
    "no-zero-experts": dict(zero_expert_num=0),
    "mostly-zero-experts": dict(zero_expert_num=24, moe_topk=3),
    "tied": dict(tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", spread(sorted(CHANGED), 2))
def test_other_shapes_are_transformers_too(name: str, registry: Registry, write_oracle: Callable[..., Oracle]) -> None:
    oracle = write_oracle(f"{FAMILY}-{name}", LongcatFlashConfig(**longcat_shape(**CHANGED[name])))
    assert_last_logits(oracle, registry, oracle.prompts[3:5], max_batch_tokens=16)
    some = oracle.prompts[:2]
    assert_greedy(oracle, generate(Engine.build(options(oracle), registry), some), some)


def test_random_weights_have_the_size_of_others(oracle: Oracle, registry: Registry) -> None:
    logits = last_logits(registry, options(oracle, load_format="dummy"), oracle.prompts[4])
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 10


def test_the_large_one_has_as_many_parameters_as_its_model_card_says(registry: Registry, tmp_path: Path) -> None:
    config = {**LongcatFlashConfig().to_dict(), "architectures": ["LongcatFlashForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = EngineOptions(model=str(tmp_path), load_format="dummy", device="cpu", dtype="bfloat16")
    assert check_weights(choose(asked, registry)).record.num_bytes() / 2 == pytest.approx(560e9, rel=0.005)
