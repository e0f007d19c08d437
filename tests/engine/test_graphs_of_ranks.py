"""Captured decoding steps of several ranks: each keeps its columns of logits, and all find the best tokens within the graph.

Ranks are threads (`rank_threads`), and a graph runs its function again; on GPUs: `tests/gpu/test_ranks_gpu.py`.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core.testing.graph_backend import GraphBackend
from cuda_on_host import here
from cuda_simulated import simulated
from engine import rank_threads
from engine.rank_pair import request, serve
from engine.rank_threads import on_threads
from parity.engine_driver import options
from parity.oracle import Oracle

from enginery.engine.build import BuiltParts, build_parts
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.worker.paths.capture import _prepare
from enginery.worker.paths.captured_step import Replayable
from enginery.worker.paths.cuda_capture import CudaCapture
from enginery.worker.paths.decode_capture import DecodeCapture
from enginery.worker.paths.decode_graphs import DecodeGraphs, LogitsHead
from enginery.worker.ranks.collectives import HeadColumns
from enginery.worker.ranks.path import ColumnsHead

MOST = 6
ASKED: dict[str, dict[str, object]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 7},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {7: 4.0}},
}


class Again:
    """In place of a CUDA graph."""

    def __init__(self, run: Callable[[], None]) -> None:
        run()
        self.replay = run


def with_graphs(asked: Any, registry: Registry, **given: Any) -> BuiltParts:
    """All sizes are captured at the start, on every rank."""

    class Composed(Registry):
        def create_attn_backend(self, name: str, context: Any) -> Any:
            return GraphBackend(context)

    composed = Composed(**{field.name: vars(registry)[field.name] for field in dataclasses.fields(registry)})
    parts = build_parts(dataclasses.replace(asked, attention_backend="torch"), composed, **given)
    capture: Callable[[Callable[[], None]], Replayable] = Again
    step, joined = parts.step, parts.step.joined
    head = LogitsHead(step, MOST) if joined is None else ColumnsHead(step, joined, MOST)
    graphs = DecodeGraphs.build(DecodeCapture(step, MOST, head=head, record=capture))
    assert graphs is not None
    _prepare(graphs, None, parts.choice)
    assert not graphs.waiting(), "nothing is left for idle moments, in which other ranks would not take part"
    sizes = [key.size for key in graphs.captured]
    assert sizes == sorted(sizes, reverse=True), "the smaller fit into the memory of the larger"
    return dataclasses.replace(parts, captured=parts.captured._replace(graphs=graphs))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginery.attention.relay.is_capturing", lambda out: True)  # no backend is called in a real replay
    monkeypatch.setattr(rank_threads, "build_parts", with_graphs)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_graphs_of_ranks_tell_what_one_rank_tells(
    llama: Oracle, registry: Registry, captured: None, monkeypatch: pytest.MonkeyPatch, *, ranks: int, overlap: bool
) -> None:
    """Alone in its batch, each kind of request, and all together. Of greedy ones nobody brings logits together."""
    asked = options(llama, overlap=overlap, num_pages=120, max_batch_requests=MOST)
    every = [request(name, llama.prompts[5], **params) for name, params in ASKED.items()]
    batches = [every[:1], every, every[1:2], [request("many tokens", llama.prompts[6], max_tokens=20), *every[2:]]]
    expected = [serve(Engine.build(asked, registry), batch) for batch in batches]
    gathered: list[int] = []
    gather = HeadColumns.gather

    def noted(head: HeadColumns, partial: torch.Tensor) -> torch.Tensor:
        gathered.append(len(partial))
        return gather(head, partial)

    monkeypatch.setattr(HeadColumns, "gather", noted)
    with on_threads(dataclasses.replace(asked, tp=ranks), registry) as (engine, _):
        found = [serve(engine, batches[0])]
        assert gathered == []
        found += [serve(engine, batch) for batch in batches[1:]]
        assert len(gathered) > 8 * ranks
        assert engine.meter.stats().num_graph_steps > 25
    assert [{name: told.tokens for name, told in each.items()} for each in found] == [
        {name: told.tokens for name, told in each.items()} for each in expected
    ]
    for mine, one in zip(found[1]["logprobs"].logprobs, expected[1]["logprobs"].logprobs, strict=True):
        assert mine.logprob == pytest.approx(one.logprob, abs=2e-5)


def test_no_rank_runs_anything_while_another_captures() -> None:
    """NCCL may have to wait for all kernels of a GPU while another rank captures: none may wait there for that rank."""
    done, barrier = list[str](), threading.Barrier(2, timeout=20)

    def run() -> None:
        time.sleep(0.02 if threading.current_thread().name == "slow" else 0)
        done.append("run" if here.capturing is None else "capture")

    def rank() -> None:
        capture = CudaCapture(torch.device("cuda", 0), meet=lambda: barrier.wait() and None)
        for _ in range(3):
            capture(run)

    with simulated():
        threads = [threading.Thread(target=rank, name=name) for name in ("slow", "fast")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert done == ["run", "run", "capture", "capture"] * 3
