"""Hole 12: what a plugin's model returns is looked at on every path, and the plugin is named when it cannot be right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from enginery.config.schema import EngineOptions
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.engine.build import BuiltParts, build_parts
from enginery.engine.engine import Engine
from enginery.errors import PluginError
from enginery.kv.pool import PagedKVPool
from enginery.plugin.registry import Registry
from enginery.worker.warm_up import warm_up

Change = Callable[[torch.Tensor], object]
ASKED = EngineOptions(num_pages=32, max_model_len=128, num_threads=1, device="cpu", dtype="bfloat16")
LLAMA = r"plugin model-llama \(enginery-model-llama==.*\)"
CHANGES = [
    (
        "logits",
        lambda logits: logits[:, :100],
        rf"{LLAMA}: logits of its model returned \[\d+, 100\] in torch.\w+ instead of logits \[\d+, 4096\]",
    ),
    ("logits", lambda logits: logits[:0], r"logits of its model returned \[0, 4096\] in torch.\w+ instead of logits \[\d+, 4096\]"),
    ("logits", lambda logits: None, r"logits of its model returned None instead of"),
    (
        "forward",
        lambda hidden: hidden[:, :8],
        rf"{LLAMA}: forward of its model returned \[\d+, 8\] in torch.\w+ instead of hidden states",
    ),
    (
        "forward",
        lambda hidden: hidden[None],
        r"forward of its model returned \[1, \d+, \d+\] in torch.\w+ instead of hidden states",
    ),
    (
        "forward",
        lambda hidden: hidden.double(),
        r"forward of its model returned \[\d+, \d+\] in torch.float64 instead of hidden states \[.*\] in torch.bfloat16",
    ),
    ("forward", lambda hidden: (hidden,), r"forward of its model returned \(tensor.* instead of hidden states"),
]


class ChangedModel:
    """A model one of whose methods returns something else."""

    def __init__(self, parts: BuiltParts, method: str, change: Change) -> None:
        self.forward, self.logits = parts.step.model.forward, parts.step.model.logits
        right = getattr(self, method)
        setattr(self, method, lambda *given: change(right(*given)))


@pytest.mark.parametrize(("method", "change", "said"), CHANGES)
def test_a_model_that_returns_another_shape_or_dtype_is_refused_with_its_plugin(
    registry: Registry, method: str, change: Change, said: str
) -> None:
    parts = build_parts(ASKED, registry)
    changed = parts.step._replace(model=ChangedModel(parts, method, change))
    engine = Engine(dataclasses.replace(parts, step=changed), registry, ASKED)
    params = SamplingParams(max_tokens=2, temperature=0.0)
    engine.submit(GenerationRequest(request_id="a", prompt_token_ids=(5, 6, 7), params=params))
    with pytest.raises(PluginError, match=said):
        engine.step()


@pytest.mark.parametrize(("method", "change", "said"), CHANGES[::3])
def test_on_a_device_it_is_refused_at_the_start(registry: Registry, method: str, change: Change, said: str) -> None:
    parts = build_parts(dataclasses.replace(ASKED, attention_backend="torch"), registry)
    pool = parts.step.relay.backend.pool
    assert isinstance(pool, PagedKVPool)
    with pytest.raises(PluginError, match=said):
        warm_up(parts.step._replace(model=ChangedModel(parts, method, change)), longest=32)
