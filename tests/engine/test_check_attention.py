"""What is watched of attention backends in an engine: their ids are unique, and `check_attention` names the one that does wrong."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from installed import install
from parity.engine_driver import generate

from enginery.config.schema import EngineOptions
from enginery.contracts.batch import FULL, ForwardBatch, Phase, View
from enginery.engine.build import build_parts
from enginery.engine.engine import Engine
from enginery.errors import PluginError, StalePlan
from enginery.plugin.registry import Registry

PLUGIN = '''
from enginery.api import AttnBackendSpec, hookimpl
from enginery_attn_torch.backend import TorchAttention
from enginery_attn_torch.spec import TORCH


class Idle(TorchAttention):
    """Leaves `out` as it was."""

    def attend(self, q, k, v, layer, batch, plan, out):
        pass


class Scribbling(TorchAttention):
    """Writes to a host tensor of a batch that is planned."""

    def attend(self, q, k, v, layer, batch, plan, out):
        super().attend(q, k, v, layer, batch, plan, out)
        batch.kv_lens_cpu.add_(1)


@hookimpl
def register_attn_backends():
    names = ("idle", "scribbling")
    return [AttnBackendSpec(name=name, api=(2, 0), priority=1, summary="", capabilities=TORCH.capabilities) for name in names]


@hookimpl
def create_attn_backend(name, context):
    return {"idle": Idle, "scribbling": Scribbling}[name](context)
'''


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A distribution with two wrong backends, found like any other."""
    install(tmp_path, "wrong-plugin", "wrong_plugin", PLUGIN, name="wrong")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("wrong_plugin")
    monkeypatch.undo()
    del sys.modules["wrong_plugin"]


@pytest.mark.usefixtures("wrong")
@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("idle", PluginError, r"softmax/idle#\d+ left 3 of 3 rows of `out` unwritten"),
        ("scribbling", StalePlan, r"a host tensor of the batch was written after it was planned for .*softmax/scribbling#"),
    ],
)
def test_a_backend_that_does_wrong_is_named_where_it_is_checked(name: str, error: type[Exception], said: str) -> None:
    asked = EngineOptions(attention_backend=name, num_pages=8, check_attention=True)
    with pytest.raises(error, match=said):
        generate(Engine.build(asked, Registry.load()), [[10, 11, 12]], max_tokens=2)


def test_a_right_backend_gives_the_same_tokens_where_it_is_checked() -> None:
    registry = Registry.load()
    engines = [Engine.build(EngineOptions(num_pages=8, check_attention=checked), registry) for checked in (False, True)]
    plain, checked = (generate(engine, [[10, 11, 12], [13]], max_tokens=4) for engine in engines)
    assert checked == plain


def test_two_workers_in_one_process_have_other_ids_and_refuse_each_other_s_plans() -> None:
    """Hole 2: both had `torch#0`."""
    registry = Registry.load()
    asked = EngineOptions(attention_backend="torch", num_pages=8, dtype="float32")
    first, second = (build_parts(asked, registry).step.relay for _ in range(2))
    assert first.backend_id != second.backend_id
    one = torch.ones(1, dtype=torch.int32)
    batch = ForwardBatch(
        phase=Phase.PREFILL,
        input_ids=one.long(),
        positions=one.long() - 1,
        q_lens_cpu=one,
        kv_lens_cpu=one,
        num_logits_cpu=one,
        seats_cpu=one - 1,
        views={FULL: View(slots=one.long() - 1, page_table_cpu=torch.zeros(1, 1, dtype=torch.int32))},
    )
    plan = first.make_plan(batch, capture=False)
    assert second.plan(batch.planned(plan)).plan is not plan
    row = torch.zeros(1, 1, 1)
    with pytest.raises(StalePlan, match="plan after padding"):
        second.attend(row, row, row, None, batch, plan, row)
