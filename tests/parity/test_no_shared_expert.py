"""Mixtures whose shared expert has size 0, which transformers stores as tensors without numbers, equal it too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
from parity import oracle as families
from parity.engine_driver import assert_last_logits, assert_ranks, last_logits, options
from parity.oracle import Oracle
from parity.test_hybrids import HYBRIDS, LING_3
from parity.test_mamba import FAMILIES as MAMBAS
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, PretrainedConfig

from enginery.errors import CheckpointError
from enginery.plugin.registry import Registry

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # transformers', as it makes them


def changed(config: PretrainedConfig, **changes: object) -> PretrainedConfig:
    other = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(other, name, value)
    return other


MIXTURES: dict[str, PretrainedConfig] = {
    "glm4-moe-lite": changed(families.EXPERT_FAMILIES["glm4-moe-lite"], n_shared_experts=0),
    "granite": changed(MAMBAS["granite_moe"], shared_intermediate_size=0),
    "kimi_linear": changed(HYBRIDS["kimi_linear"], n_shared_experts=0),
    "ling_3": CONFIG_MAPPING["bailing_hybrid"](**LING_3 | {"n_shared_experts": 0}, experts_implementation="eager"),
    "qwen2-moe": changed(families.EXPERT_FAMILIES["qwen2-moe"], shared_expert_intermediate_size=0),
    "qwen3_5_moe": changed(HYBRIDS["qwen3_5_moe"], shared_expert_intermediate_size=0),
    "qwen3_next": changed(HYBRIDS["qwen3_next"], shared_expert_intermediate_size=0),
}


@pytest.fixture(params=sorted(MIXTURES))
def oracle(request: pytest.FixtureRequest, write_oracle: Callable[..., Oracle]) -> Oracle:
    return write_oracle(f"{request.param} without a shared expert", MIXTURES[request.param])


def test_logits_are_transformers(oracle: Oracle, registry: Registry) -> None:
    empty = [name for name, tensor in load_file(oracle.folder / "model.safetensors").items() if not tensor.numel()]
    assert empty
    assert all("shared" in name for name in empty)
    assert_last_logits(oracle, registry, oracle.prompts[:2])


@pytest.mark.parametrize("oracle", ["granite", "qwen3_next"], indirect=True)
def test_ranks_have_their_parts(oracle: Oracle) -> None:
    assert_ranks(oracle, oracle.prompts[4], tensor_size=2, num_stages=2)


@pytest.mark.parametrize("oracle", ["granite", "qwen3_next"], indirect=True)
def test_a_shared_expert_that_config_json_leaves_out_is_not_left_out_silently(
    oracle: Oracle, registry: Registry, tmp_path: Path
) -> None:
    tensors = load_file(oracle.folder / "model.safetensors")
    name = next(name for name, tensor in tensors.items() if not tensor.numel())
    folder = oracle.copied(tmp_path / "copy", without=())
    shape = [size or 8 for size in tensors[name].shape]
    save_file(tensors | {name: tensors[name].new_ones(shape)}, Path(folder) / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}' in .* is unexpected"):
        last_logits(registry, options(oracle, model=folder), oracle.prompts[0])


@pytest.mark.parametrize("oracle", ["granite"], indirect=True)
def test_layers_without_experts_and_without_an_mlp_are_refused(oracle: Oracle, registry: Registry, tmp_path: Path) -> None:
    folder = oracle.copied(tmp_path / "copy", without=(), num_local_experts=0)
    with pytest.raises(CheckpointError, match="shared_intermediate_size 0, which must be a whole number of 1 or more"):
        last_logits(registry, options(oracle, model=folder), oracle.prompts[0])
