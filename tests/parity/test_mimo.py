"""MiMo-V2-Flash equals transformers: windows with sinks and KV heads of their own, values narrower than keys, grouped experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from parity.engine_driver import (
    CUT_UP,
    assert_cut_up,
    assert_greedy,
    assert_last_logits,
    assert_ranks,
    generate,
    options,
    rounding_error,
)
from parity.oracle import Oracle, expert_shape, shape
from transformers import MiMoV2FlashConfig

from enginery.checkpoint.files import scan_checkpoint
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

CONFIG = MiMoV2FlashConfig(
    **shape(
        head_dim=24,
        v_head_dim=16,
        n_routed_experts=8,
        sliding_window=17,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    )
    | expert_shape()
)


@pytest.fixture
def oracle(write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle("mimo_v2_flash", CONFIG)


def test_files_have_the_hubs_names(oracle: Oracle) -> None:
    stored = scan_checkpoint(oracle.folder)
    assert stored["model.layers.1.self_attn.attention_sink_bias"].shape == (4,)
    assert "model.layers.0.self_attn.attention_sink_bias" not in stored
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in stored


def test_logits_after_a_prompt_are_transformers(oracle: Oracle, registry: Registry) -> None:
    assert_last_logits(oracle, registry, oracle.prompts[:5], max_batch_tokens=16)


def test_the_names_of_transformers_are_read_too(oracle: Oracle, registry: Registry, tmp_path: Path) -> None:
    oracle.model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.1.self_attn.sinks" in scan_checkpoint(tmp_path)
    assert_last_logits(oracle, registry, oracle.prompts[4:5], model=str(tmp_path))


@pytest.mark.parametrize("changes", CUT_UP, ids=str)
def test_greedy_tokens_are_transformers_however_the_work_is_cut_up(
    oracle: Oracle, registry: Registry, changes: dict[str, object]
) -> None:
    assert_cut_up(oracle, registry, changes)


def test_a_cached_prompt_gives_the_same_tokens(oracle: Oracle, registry: Registry) -> None:
    engine = Engine.build(options(oracle, page_size=16), registry)
    prompts = oracle.prompts[4:6]
    for _ in range(3):
        assert_greedy(oracle, generate(engine, prompts), prompts)


@pytest.mark.parametrize(("tensor_size", "num_stages"), [(1, 1), (2, 1), (4, 2)])
def test_ranks_have_their_parts_of_heads_sinks_and_experts(oracle: Oracle, tensor_size: int, num_stages: int) -> None:
    assert_ranks(oracle, oracle.prompts[4], tensor_size=tensor_size, num_stages=num_stages)


def test_half_precision_stays_close(oracle: Oracle, registry: Registry) -> None:
    assert rounding_error(oracle, registry) < 0.06
