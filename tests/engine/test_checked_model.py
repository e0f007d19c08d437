"""Hole 12: what a plugin's model returns is looked at, and the plugin is named when it cannot be right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from enginery.config.schema import EngineOptions
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.engine.engine import Engine
from enginery.errors import PluginError
from enginery.plugin.registry import Registry
from enginery.worker.checked_model import CheckedModel

Change = Callable[[torch.Tensor], object]
LLAMA = r"plugin model-llama \(enginery-model-llama==.*\)"


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.load()


@pytest.mark.parametrize(
    ("method", "change", "said"),
    [
        ("logits", lambda logits: logits[:, :100], rf"{LLAMA}: logits of its model gave \[1, 100\] instead of \[1, \d+\]"),
        ("logits", lambda logits: logits[:0], r"logits of its model gave \[0, \d+\] instead of \[1, \d+\]"),
        ("logits", lambda logits: None, r"logits of its model gave None instead of"),
        ("forward", lambda hidden: hidden[:, :8], rf"{LLAMA}: forward of its model gave \[1, 8\], not hidden states \[3, \d+\]"),
        ("forward", lambda hidden: hidden[None], r"forward of its model gave \[1, 1, \d+\], not hidden states"),
        ("forward", lambda hidden: (hidden,), r"forward of its model gave \(tensor.*, not hidden states"),
    ],
)
def test_a_model_that_returns_another_shape_is_refused_with_its_plugin(
    registry: Registry, method: str, change: Change, said: str
) -> None:
    engine = Engine.build(EngineOptions(num_pages=32, max_model_len=128, num_threads=1), registry)
    checked = engine._runner.model
    assert isinstance(checked, CheckedModel)
    right = getattr(checked.model, method)
    setattr(checked.model, method, lambda *given: change(right(*given)))
    engine.submit(
        GenerationRequest(request_id="a", prompt_token_ids=(5, 6, 7), params=SamplingParams(max_tokens=2, temperature=0.0))
    )
    with pytest.raises(PluginError, match=said):
        engine.step()
