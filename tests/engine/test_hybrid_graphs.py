"""Engines of a small hybrid whose steps that verify drafts are captured, states too: they tell what plain decoding tells.

Here a graph runs its function again, and kernels are interpreted; on a GPU see tests/gpu/test_speculation_gpu.py.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from engine.heads_made import write_module
from engine.test_device_drafts import captured, unread
from engine.test_speculation import Scripted, answers_of, with_drafter
from pairwise import spread
from parity.engine_driver import options
from parity.oracle import Oracle, randomise, shape
from parity.test_hybrids import DELTA, SOME_EXPERTS
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from enginery.contracts.attention import BackendContext
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry

__all__ = ["unread"]
BuildBackend = Callable[[BackendContext], object]
KINDS = ["linear_attention", "full_attention", "full_attention"]  # the last: the MTP module's
SMALL = {**DELTA, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
CONFIG = Qwen3NextConfig(**shape(**SMALL, num_hidden_layers=3, layer_types=KINDS), **SOME_EXPERTS, experts_implementation="eager")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Of two layers, with a module for multi-token prediction."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG).eval().float()
    randomise(model)
    whole, folder = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("hybrid") / "mtp"
    model.save_pretrained(whole)
    module = write_module(Oracle(whole, model), folder, carries_normed=True, is_qwen=True)
    return Oracle(module.folder, model)


def requests_of(hybrid: Oracle) -> list[GenerationRequest]:
    """Greedy, drawn, and with penalties: drafts of the last two are accepted behind the graph."""
    asks = {"greedy": {}, "drawn": {"temperature": 0.9, "seed": 7}, "penalties": {"repetition_penalty": 1.3}}
    return [
        GenerationRequest(
            request_id=about,
            prompt_token_ids=tuple(hybrid.prompts[place][:9]),
            params=SamplingParams(**{"max_tokens": 14, "temperature": 0.0, "ignore_eos": True, **asked}),
        )
        for place, (about, asked) in enumerate(asks.items())
    ]


@pytest.fixture
def delta() -> BuildBackend:
    """Of recurrent layers, its kernels interpreted."""
    pytest.importorskip("triton")
    with patch.dict(os.environ, TRITON_INTERPRET="1"):  # not for longer: engines would choose the interpreter for others
        build: BuildBackend = pytest.importorskip("enginery_attn_delta.backend").DeltaAttention
    if not pytest.importorskip("enginery_attn_delta.kernels.launch").INTERPRETED.value:
        pytest.skip("triton was imported for the compiler in this process")
    return build


@pytest.mark.parametrize("kind", spread(["random", "some"], 1))
def test_states_that_a_graph_moves_are_those_of_plain_decoding(hybrid: Oracle, delta: BuildBackend, kind: str) -> None:
    """However many drafts are right, alone and together, and where a page is passed amid them."""
    registry, requests = Registry.load(), requests_of(hybrid)
    asked = options(hybrid, page_size=4, num_pages=200, num_threads=1)
    plain = answers_of(Engine.build(asked, registry), requests)
    scripted = Scripted(kind, {each.prompt_token_ids: plain[each.request_id].tokens for each in requests})
    drafting = dataclasses.replace(asked, drafter="scripted", draft_length="3")
    engine, capture, _ = captured(drafting, with_drafter(registry, lambda _: scripted), recurrent=delta)
    for some in (requests[:1], requests):
        found = answers_of(engine, some)
        assert {about: one.tokens for about, one in found.items()} == {
            each.request_id: plain[each.request_id].tokens for each in some
        }
    assert capture.num_replayed > (15 if kind == "some" else 20)
    assert engine.meter.stats().drafts.accepted > 10
    engine._scheduler.check_idle()


def test_a_module_drafts_behind_graphs_of_a_hybrid(hybrid: Oracle, delta: BuildBackend, unread: None) -> None:
    registry, requests = Registry.load(), requests_of(hybrid)[:2]
    asked = options(hybrid, page_size=4, num_pages=200, num_threads=1)
    plain = answers_of(Engine.build(asked, registry), requests)
    engine, capture, _ = captured(dataclasses.replace(asked, drafter="mtp", draft_length="2"), registry, recurrent=delta)
    for about, found in answers_of(engine, requests).items():
        assert found.tokens == plain[about].tokens, about
    assert capture.num_replayed > 20
    assert engine.meter.stats().drafts.drafted > 20
