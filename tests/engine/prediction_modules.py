"""Models with modules for multi-token prediction: one, or a chain of three; the last two are fixtures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine.heads_made import Module, write_module
from parity.ling_made import LINGS
from parity.oracle import EXPERT_FAMILIES, Oracle, expert_shape, shape
from parity.test_hybrids import DELTA, SOME_EXPERTS
from transformers import MiMoV2FlashConfig, PretrainedConfig, Qwen3_5TextConfig, Qwen3NextConfig

KINDS = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]  # the last: the module's
HYBRID = shape(**DELTA, num_hidden_layers=5, layer_types=KINDS)
QWEN3_NEXT = Qwen3NextConfig(**HYBRID, **SOME_EXPERTS, experts_implementation="eager")
MIMO = MiMoV2FlashConfig(
    **shape(
        num_hidden_layers=4,
        head_dim=24,
        v_head_dim=16,
        n_routed_experts=8,
        sliding_window=17,
        layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "dense"],
    )
    | expert_shape()
)
MODULES: dict[str, tuple[PretrainedConfig, dict[str, bool]]] = {
    "deepseek-v3": (EXPERT_FAMILIES["deepseek-v3"], {"carries_normed": False}),
    "glm4-moe": (EXPERT_FAMILIES["glm4-moe"], {"carries_normed": True}),
    "glm4-moe-lite": (EXPERT_FAMILIES["glm4-moe-lite"], {"carries_normed": True}),
    "ling-2": (LINGS["ling-2"], {"carries_normed": True, "is_ling": True}),
    "qwen3-next": (QWEN3_NEXT, {"carries_normed": True, "is_qwen": True}),
    "qwen3.5": (Qwen3_5TextConfig(**HYBRID), {"carries_normed": True, "is_qwen": True, "is_beside_images": True}),
    "mimo-v2-flash": (MIMO, {"carries_normed": True, "is_mimo": True}),
}


@pytest.fixture
def module_of(write_oracle: Callable[..., Oracle], tmp_path: Path) -> Callable[..., Module]:
    def made(name: str, **changes: object) -> Module:
        config, kind = MODULES[name]
        return write_module(write_oracle(f"mtp {name}", config), tmp_path / "mtp", **kind, **changes)

    return made


@pytest.fixture
def chain_of(write_oracle: Callable[..., Oracle], tmp_path: Path) -> Callable[..., Module]:
    """Three modules behind three layers; of Qwen three layers in `mtp`."""

    def made(name: str) -> Module:
        return write_module(write_oracle(f"chain {name}", longer(name)), tmp_path / "chain", count=3, **MODULES[name][1])

    return made


def longer(name: str) -> PretrainedConfig:
    """Of a family in `MODULES`, with six layers."""
    config = MODULES[name][0]
    changes: dict[str, object] = {"num_hidden_layers": 6, "experts_implementation": "eager"}
    if name == "qwen3.5":
        changes["layer_types"] = [*KINDS[:3], *["full_attention"] * 3]
    elif name == "mimo-v2-flash":
        changes["layer_types"] = ["full_attention", "sliding_attention", "full_attention", *["sliding_attention"] * 3]
        changes["mlp_layer_types"] = ["dense", "sparse", "sparse", *["dense"] * 3]
    elif config.to_dict().get("mlp_layer_types"):
        changes["mlp_layer_types"] = ["dense", *["sparse"] * 5]
    return type(config)(**{**config.to_dict(), **changes})
