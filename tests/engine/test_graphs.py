"""Captured decoding steps give the eager ones' tokens. Here a graph runs its function again; on a device it is a CUDA graph."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from core.testing.graph_backend import GraphBackend, NeverRefreshes
from pairwise import in_turn
from parity.engine_driver import assert_greedy, generate, greedy, options
from parity.oracle import Oracle

from enginery.config.schema import EngineOptions
from enginery.engine.build import BuiltParts, build_parts
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.worker.paths.captured_step import Replayable
from enginery.worker.paths.decode_capture import DecodeCapture
from enginery.worker.paths.decode_graphs import DecodeGraphs, LogitsHead, graph_sizes
from enginery.worker.paths.running_step import NAN_ERROR

MAX_REQUESTS = 6


def assert_kept(run: Callable[[], None]) -> None:
    """A CUDA graph keeps no memory alive: somebody else has to hold what the captured function reads and writes."""
    for name, cell in zip(run.__code__.co_freevars, run.__closure__ or (), strict=True):
        if isinstance(value := cell.cell_contents, torch.Tensor):
            storage = value.untyped_storage()
            alone = sys.getrefcount(value) == 3  # the cell, `value`, and the argument
            unshared = torch._C._storage_Use_Count(storage._cdata) == 2  # the tensor's and `storage`
            assert not (alone and unshared), f"{name} is held by the captured function alone"


class AgainAndAgain:
    """In place of a CUDA graph: replaying runs the function, which reads and writes the same memory."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def __call__(self, run: Callable[[], None]) -> Replayable:
        run()
        self.num_captured += 1
        outer = self

        class Again:
            def replay(self) -> None:
                outer.num_replayed += 1
                assert_kept(run)
                with mock.patch(
                    "enginery.attention.relay.is_capturing", return_value=True
                ):  # no backend is called in a real replay
                    run()

        return Again()


def with_graphs(
    asked: EngineOptions, registry: Registry, backend: Callable[[object], GraphBackend] = GraphBackend
) -> tuple[Engine, AgainAndAgain]:
    """An engine over a backend that can be captured, on the host."""
    create = registry.create_attn_backend

    class Composed(Registry):
        def create_attn_backend(self, name: str, context: object) -> object:
            return backend(context)

    composed = Composed(**{field.name: vars(registry)[field.name] for field in dataclasses.fields(registry)})
    assert create is not composed.create_attn_backend
    parts: BuiltParts = build_parts(dataclasses.replace(asked, attention_backend="torch"), composed)
    capture = AgainAndAgain()
    head = LogitsHead(parts.step, MAX_REQUESTS)
    graphs = DecodeGraphs.build(DecodeCapture(parts.step, MAX_REQUESTS, head=head, record=capture))
    assert graphs is not None
    return Engine(dataclasses.replace(parts, captured=parts.captured._replace(graphs=graphs)), registry, asked), capture


@in_turn(("count", [1, 5, 7]), ("overlap", [False, True]))
def test_captured_steps_give_transformers_tokens(
    llama: Oracle, registry: Registry, caplog: pytest.LogCaptureFixture, *, count: int, overlap: bool
) -> None:
    engine, capture = with_graphs(options(llama, overlap=overlap, num_pages=60), registry)
    assert_greedy(llama, generate(engine, llama.prompts[:count]), llama.prompts[:count])
    if count <= MAX_REQUESTS:  # seven at once are more than the largest graph
        assert capture.num_replayed > 30
        assert 1 <= capture.num_captured <= 4
    else:
        assert capture.num_replayed == 0
        assert "7 requests are decoded eagerly: graphs are for up to 6" in caplog.text


def test_the_largest_size_is_captured_at_the_start_others_when_needed_and_the_rest_in_idle_moments(
    llama: Oracle, registry: Registry
) -> None:
    engine, capture = with_graphs(options(llama, num_pages=60), registry)
    assert graph_sizes(MAX_REQUESTS) == (1, 2, 4, 6)
    assert capture.num_captured == 1
    generate(engine, llama.prompts[:6], max_tokens=4)
    assert capture.num_captured == 1
    generate(engine, llama.prompts[:3], max_tokens=4)
    assert capture.num_captured == 2
    while engine.prepare():
        pass
    assert capture.num_captured == len(graph_sizes(MAX_REQUESTS))
    assert_greedy(llama, generate(engine, llama.prompts[:3]), llama.prompts[:3])
    assert capture.num_captured == len(graph_sizes(MAX_REQUESTS))


def test_a_backend_that_does_not_refresh_is_noticed_here(llama: Oracle, registry: Registry) -> None:
    engine, _ = with_graphs(options(llama, num_pages=60), registry, NeverRefreshes)
    with pytest.raises(AssertionError):
        assert_greedy(llama, generate(engine, llama.prompts[:2]), llama.prompts[:2])


def test_a_backend_without_graphs_runs_eagerly_and_says_so(
    llama: Oracle, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    parts = build_parts(options(llama, attention_backend="torch"), registry)
    steps = DecodeCapture(parts.step, 4, head=LogitsHead(parts.step, 4), record=AgainAndAgain())
    with caplog.at_level("INFO"):
        graphs = DecodeGraphs.build(steps)
    assert graphs is None
    assert re.search(r"decoding runs eagerly: target/0/softmax/torch#\d+ has no init_graph_state", caplog.text)


def test_sizes_pad_little() -> None:
    sizes = graph_sizes(256)
    assert sizes[-1] == 256
    assert list(sizes) == sorted(set(sizes))
    for count in range(1, 257):
        size = next(size for size in sizes if size >= count)
        assert size - count <= max(7, count // 4)


def test_nan_logits_in_a_captured_step_end_their_request_alone_even_if_it_asks_for_logprobs(
    llama: Oracle, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, capture = with_graphs(options(llama, num_pages=60), registry)
    for index, prompt in enumerate(llama.prompts[:2]):
        engine.submit(greedy(str(index), prompt, max_tokens=12, logprobs=1))
    while capture.num_replayed < 3:
        engine.step()
    compute = engine._runner.parts.model.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        monkeypatch.setattr(engine._runner.parts.model, "logits", compute)
        return compute(hidden).index_fill(0, torch.tensor([0]), torch.nan)

    monkeypatch.setattr(engine._runner.parts.model, "logits", poisoned)
    ends: dict[str, object] = {}
    while engine.has_work:
        ends |= {output.request_id: output.error or output.finish_reason for output in engine.step()}
    assert sorted(map(str, ends.values())) == ["length", NAN_ERROR]
