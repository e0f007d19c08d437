"""Prefills and mixed steps captured with their attention give the eager ones' tokens. Here a graph runs its function again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from unittest import mock

import pytest
from engine.captured_backends import CapturedTorch
from engine.test_graphs import AgainAndAgain
from engine.test_mixed_graphs import MOST_REQUESTS, with_pieces
from pairwise import crossed, in_turn
from parity import test_gemma
from parity.engine_driver import assert_greedy, generate
from parity.oracle import EXPERT_FAMILIES, FAMILIES, Oracle

from enginery.api import BackendContext, ForwardBatch, ForwardPlan, Phase, Unsupported, hookimpl
from enginery.plugin.registry import Registry
from enginery.worker.paths import mixed_graphs


class MixedTorch(CapturedTorch):
    """most_prompts: of a batch that there is room for."""

    most_prompts = MOST_REQUESTS

    @hookimpl
    def init_mixed_graph_state(self, max_batch_size: int, max_num_tokens: int) -> bool:
        assert max_batch_size == MOST_REQUESTS
        return super().init_mixed_graph_state(max_batch_size, max_num_tokens)

    @hookimpl
    def refresh_graph_metadata(self, plan: ForwardPlan, batch: ForwardBatch) -> bool:
        assert batch.phase is Phase.MIXED
        assert batch.num_tokens == plan.key.num_tokens, "the rows of nobody are in it"
        if batch.num_requests - batch.num_decode_requests > self.most_prompts:
            raise Unsupported("too many prompts")
        return super().refresh_graph_metadata(plan, batch)


class TooFull(MixedTorch):
    most_prompts = 0


def over(registry: Registry, backend: type[MixedTorch]) -> Registry:
    class Composed(Registry):
        def create_attn_backend(self, name: str, context: BackendContext) -> object:
            return backend(context) if name == "torch" else registry.create_attn_backend(name, context)

    return Composed(**{field.name: vars(registry)[field.name] for field in fields(registry)})


@in_turn(("family", ["llama", "qwen3-moe", "gemma3"]), ("step, overlap", crossed([16, 50], [False, True])))
def test_steps_with_their_attention_are_one_graph_and_give_transformers_tokens(
    write_oracle: Callable[..., Oracle], registry: Registry, family: str, step: int, *, overlap: bool
) -> None:
    oracle = write_oracle(family, (FAMILIES | EXPERT_FAMILIES | test_gemma.GEMMAS)[family])
    whole, asked = AgainAndAgain(), {"overlap": overlap, "max_batch_tokens": step, "dtype": "float32"}
    engine, pieces = with_pieces(oracle, over(registry, MixedTorch), whole=whole, **asked)
    assert_greedy(oracle, generate(engine, oracle.prompts[:MOST_REQUESTS]), oracle.prompts[:MOST_REQUESTS])
    assert whole.num_replayed >= 2
    assert pieces.num_replayed == 0
    assert engine.meter.stats().num_graph_steps == whole.num_replayed


@pytest.mark.parametrize("why", ["no room", "too many requests", "long prompts"])
def test_what_there_is_no_room_for_runs_in_pieces(write_oracle: Callable[..., Oracle], registry: Registry, why: str) -> None:
    oracle = write_oracle("llama", FAMILIES["llama"])
    whole = AgainAndAgain()
    backend, most_keys = TooFull if why == "no room" else MixedTorch, 4 if why == "long prompts" else 1000
    prompts = oracle.prompts[: MOST_REQUESTS + (why == "too many requests")]
    with mock.patch.object(mixed_graphs, "MOST_KEYS", most_keys):
        engine, pieces = with_pieces(oracle, over(registry, backend), whole=whole, dtype="float32")
        assert_greedy(oracle, generate(engine, prompts), prompts)
    assert pieces.num_replayed > 0
    assert whole.num_replayed == 0


def test_sizes_are_captured_with_their_attention_in_idle_moments(write_oracle: Callable[..., Oracle], registry: Registry) -> None:
    whole = AgainAndAgain()
    engine, pieces = with_pieces(write_oracle("llama", FAMILIES["llama"]), over(registry, MixedTorch), whole=whole)
    assert (whole.num_captured, pieces.num_captured) == (1, 0)
    while engine.prepare():
        pass
    assert (whole.num_captured, pieces.num_captured) == (4, 0)


def test_where_some_steps_run_in_pieces_these_are_captured_too(write_oracle: Callable[..., Oracle], registry: Registry) -> None:
    whole, oracle = AgainAndAgain(), write_oracle("llama", FAMILIES["llama"])
    engine, pieces = with_pieces(oracle, over(registry, MixedTorch), whole=whole, in_pieces_too=True)
    while engine.prepare():
        pass
    assert (whole.num_captured, pieces.num_captured) == (4, 4)


@pytest.mark.parametrize(
    ("asked", "most_absorbed", "absorbs"),
    [("auto", 1000, True), ("absorbed", 1000, True), ("auto", 4, False), ("chunked", 1000, False)],
)
def test_prompts_of_latents_are_absorbed_within_a_graph_unless_they_are_long_or_another_way_is_asked_for(
    write_oracle: Callable[..., Oracle],
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    *,
    asked: str,
    most_absorbed: int,
    absorbs: bool,
) -> None:
    monkeypatch.setattr(mixed_graphs, "MOST_ABSORBED", most_absorbed)
    oracle, whole = write_oracle("deepseek-v2", (FAMILIES | EXPERT_FAMILIES)["deepseek-v2"]), AgainAndAgain()
    engine, pieces = with_pieces(oracle, over(registry, MixedTorch), whole=whole, dtype="float32", mla_prefill=asked)
    assert_greedy(oracle, generate(engine, oracle.prompts[:2]), oracle.prompts[:2])
    assert (whole.num_replayed > 0) == absorbs
    assert (pieces.num_replayed > 0) == (not absorbs)
