"""Checkpoints written by transformers, once per session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # their imports take seconds, which the tests that need none should not wait for
    from parity.oracle import Oracle
    from transformers import PretrainedConfig

    from enginery.plugin.registry import Registry

pytest.register_assert_rewrite("parity.engine_driver", "engine.draft_models", "engine.model_heads", "engine.rank_answers")


@pytest.fixture(scope="session")
def write_oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, PretrainedConfig], Oracle]:
    """Builds, randomises and saves a model once per session and name."""
    import torch
    import transformers
    from parity.oracle import Oracle, randomise

    made: dict[str, Oracle] = {}

    def write(name: str, config: PretrainedConfig) -> Oracle:
        if name not in made:
            config._attn_implementation = "eager"
            torch.manual_seed(0)
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(sys.modules, "fla", None)  # transformers would take fla-core's kernels, which want a GPU's tensors
                model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
            randomise(model)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[name] = Oracle(folder, model)
        return made[name]

    return write


@pytest.fixture(scope="module")
def registry() -> Registry:
    """Of all that is installed."""
    from enginery.plugin.registry import Registry

    return Registry.load()


@pytest.fixture
def llama(write_oracle: Callable[[str, PretrainedConfig], Oracle]) -> Oracle:
    from parity.oracle import FAMILIES

    return write_oracle("llama", FAMILIES["llama"])
