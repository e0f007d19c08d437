"""Checkpoints written by transformers, once per session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from parity.oracle import FAMILIES, Oracle, randomise
from transformers import PretrainedConfig


@pytest.fixture(scope="session")
def write_oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, PretrainedConfig], Oracle]:
    """Builds, randomises and saves a model once per session and name."""
    made: dict[str, Oracle] = {}

    def write(name: str, config: PretrainedConfig) -> Oracle:
        if name not in made:
            config._attn_implementation = "eager"
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
            randomise(model)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[name] = Oracle(folder, model)
        return made[name]

    return write


@pytest.fixture(params=sorted(FAMILIES))
def oracle(request: pytest.FixtureRequest, write_oracle: Callable[[str, PretrainedConfig], Oracle]) -> Oracle:
    """Each family in turn."""
    return write_oracle(request.param, FAMILIES[request.param])
