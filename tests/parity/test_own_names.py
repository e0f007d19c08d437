"""Checkpoints in the names that transformers 5 has in memory: what `save_original_format=False` writes, and programs for training
that store a state_dict. Most families' are the hub's; of these families many are not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from parity import test_hybrids, test_mamba
from parity.engine_driver import assert_last_logits, assert_ranks
from parity.oracle import Oracle
from transformers import PretrainedConfig

from enginery.checkpoint.files import scan_checkpoint
from enginery.plugin.registry import Registry

FAMILIES: dict[str, PretrainedConfig] = {
    name: config for name, config in test_hybrids.HYBRIDS.items() if name in ("kimi_linear", "ling_3")
} | {name: config for name, config in test_mamba.FAMILIES.items() if name.startswith("nemotron_h")}
OTHERS = {  # a name of each that is not the hub's
    "kimi_linear": "model.layers.1.self_attn.forget_gate.A_log",
    "ling_3": "model.layers.3.self_attn.kv_b_proj.weight",
    "nemotron_h": "model.norm_f.weight",
    "nemotron_h_moe": "model.layers.1.mixer.experts.up_proj",
    "nemotron_h_latent": "model.layers.0.mixer.experts.down_proj",
}


@pytest.fixture(params=sorted(FAMILIES))
def own(request: pytest.FixtureRequest, write_oracle: Callable[..., Oracle], tmp_path: Path) -> Oracle:
    """In several files."""
    model = write_oracle(request.param, FAMILIES[request.param]).model
    model.save_pretrained(tmp_path, save_original_format=False, max_shard_size="100KB")
    assert OTHERS[request.param] in scan_checkpoint(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    return Oracle(tmp_path, model)


def test_logits_are_transformers(own: Oracle, registry: Registry) -> None:
    assert_last_logits(own, registry, own.prompts[:2])


def test_ranks_have_their_parts(own: Oracle) -> None:
    assert_ranks(own, own.prompts[4], tensor_size=2, num_stages=2)
