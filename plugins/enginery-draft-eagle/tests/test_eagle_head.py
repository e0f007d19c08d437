"""What is a head, and what is none. Its numbers are compared in enginery-weights-tiny, which has one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from enginery.api import CONTRACT_VERSIONS, CheckpointError, HookGroup
from enginery_draft_eagle import register_drafters
from enginery_draft_eagle.spec.eagle import EAGLE
from enginery_draft_eagle.spec.eagle3 import EAGLE3

CONFIG = {
    "architectures": ["LlamaForCausalLMEagle"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def test_several_layers_are_no_head() -> None:
    assert EAGLE.model is not None
    with pytest.raises(CheckpointError, match=r"has 2 layers \(num_hidden_layers\); a head has 1"):
        EAGLE.model.describe({**CONFIG, "num_hidden_layers": 2})


def test_the_core_plans_with_one_layer_of_the_heads_own_shape() -> None:
    assert EAGLE.model is not None
    facts = EAGLE.model.describe(CONFIG)
    (layer,) = facts.layers
    assert (facts.vocab_size, facts.hidden_size, layer.num_kv_heads, layer.head_dim) == (96, 32, 2, 8)


def test_the_hook_offers_it() -> None:
    assert register_drafters() == [EAGLE, EAGLE3]
    for spec in (EAGLE, EAGLE3):
        assert spec.takes_features
        assert spec.is_model
        assert spec.api == CONTRACT_VERSIONS[HookGroup.DRAFTER]


def test_the_plugin_imports_no_torch() -> None:
    """The command line imports it at every call."""
    code = "import sys, enginery_draft_eagle; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
