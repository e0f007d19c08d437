"""Steps captured in pieces give the eager ones' tokens. Here a piece is what a thread does between two calls of attention."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import pytest
import torch
from engine.test_graphs import AgainAndAgain
from engine.test_kinds_at_random import CONFIGS as KINDS
from pairwise import crossed, in_turn
from parity.engine_driver import assert_greedy, generate, options
from parity.oracle import EXPERT_FAMILIES, FAMILIES, Oracle

from enginery.attention.socket import LayerCall, LayerSocket
from enginery.engine.build import BuiltParts, build_parts
from enginery.engine.engine import Engine
from enginery.plugin.registry import Registry
from enginery.worker.paths.mixed_graphs import MixedGraphs, piece_sizes
from enginery.worker.paths.piecewise_capture import GraphPieces

PATIENCE_S = 30
MAX_TOKENS = 256
NUM_LAYERS = 4
MOST_REQUESTS = 6


class Pausing:
    """In place of CUDA graphs: a thread runs the function again and waits at each call of attention, whose tensors it copies."""

    def __init__(self) -> None:
        self.num_captured = self.num_replayed = 0

    def __call__(self, run: Callable[[], None], socket: LayerSocket) -> GraphPieces:
        self.num_captured += 1
        calls: list[LayerCall] = []

        def note(call: LayerCall) -> None:
            call.out.fill_(torch.nan)
            calls.append(call)

        socket.on_capture = note
        run()
        socket.on_capture = None
        again, paused = threading.Event(), threading.Event()

        def rerun() -> None:
            waiting = iter(calls)

            def pause(call: LayerCall) -> None:
                mine = next(waiting)
                for theirs, own in zip(call.rows, mine.rows, strict=True):
                    own.copy_(theirs)
                paused.set()
                assert again.wait(PATIENCE_S)
                again.clear()
                call.out.copy_(mine.out)

            with torch.inference_mode():
                socket.on_capture = pause
                run()
                socket.on_capture = None
            paused.set()

        outer = self

        class Piece:
            def __init__(self, *, is_first: bool) -> None:
                self.is_first = is_first

            def replay(self) -> None:
                outer.num_replayed += 1
                paused.clear()
                if self.is_first:
                    threading.Thread(target=rerun, daemon=True).start()
                else:
                    again.set()
                assert paused.wait(PATIENCE_S)

        return GraphPieces([Piece(is_first=index == 0) for index in range(len(calls) + 1)], calls)


def with_pieces(
    oracle: Oracle, registry: Registry, *, whole: AgainAndAgain | None = None, in_pieces_too: bool = False, **asked: object
) -> tuple[Engine, Pausing]:
    wanted = options(oracle, num_pages=200, attention_backend="torch", **asked)
    parts: BuiltParts = build_parts(wanted, registry)
    capture = Pausing()
    hidden = torch.empty(MAX_TOKENS, parts.choice.facts.hidden_size)
    pieces = MixedGraphs(parts.step, hidden, capture=capture, whole=whole, most_requests=MOST_REQUESTS, in_pieces_too=in_pieces_too)
    return Engine(dataclasses.replace(parts, captured=parts.captured._replace(pieces=pieces)), registry, wanted), capture


@in_turn(("family", ["llama", "qwen3-moe", "deepseek-v2", "longcat-flash"]), ("step, overlap", crossed([16, 100], [False, True])))
def test_steps_in_pieces_give_transformers_tokens(
    write_oracle: Callable[..., Oracle], registry: Registry, family: str, step: int, *, overlap: bool
) -> None:
    oracle = write_oracle(family, (FAMILIES | EXPERT_FAMILIES)[family])
    engine, capture = with_pieces(oracle, registry, overlap=overlap, max_batch_tokens=step, dtype="float32")
    assert_greedy(oracle, generate(engine, oracle.prompts))
    in_pieces = engine.meter.stats().num_graph_steps
    assert in_pieces >= 2
    assert capture.num_replayed == in_pieces * (NUM_LAYERS + 1)


@pytest.mark.parametrize(("family", "calls"), [("qwen3_next", 4), ("falcon_h1", 8), ("gemma2", 4)])
def test_states_and_windows_move_on_between_pieces(
    write_oracle: Callable[..., Oracle], registry: Registry, family: str, calls: int
) -> None:
    """A prompt in two chunks, again from the cache, and others beside decoding; Falcon's layers have two calls each."""
    oracle = write_oracle(f"random {family}", KINDS[family])
    engine, capture = with_pieces(oracle, registry, max_batch_tokens=24, page_size=4, dtype="float32")
    prompts = [oracle.prompts[place] for place in (1, 3, 1)]
    for some in (prompts[:1], prompts):
        told = generate(engine, some, max_tokens=4)
        assert told == [oracle.continue_greedily(prompt, 4, guess=each) for prompt, each in zip(some, told, strict=True)]
    in_pieces = engine.meter.stats().num_graph_steps
    assert in_pieces == 3
    assert capture.num_replayed == in_pieces * (calls + 1)


def test_the_largest_size_is_captured_at_the_start_others_when_needed_and_the_rest_in_idle_moments(
    write_oracle: Callable[..., Oracle], registry: Registry
) -> None:
    oracle = write_oracle("llama", FAMILIES["llama"])
    engine, capture = with_pieces(oracle, registry, dtype="float32")
    assert piece_sizes(MAX_TOKENS) == (64, 128, 192, 256)
    assert capture.num_captured == 1
    generate(engine, oracle.prompts[:1], max_tokens=2)
    assert capture.num_captured == 2
    while engine.prepare():
        pass
    assert capture.num_captured == 4


def test_sizes_are_those_of_tiles_and_the_largest() -> None:
    assert piece_sizes(1024) == (64, 128, 192, 256, 320, 384, 512, 576, 640, 768, 896, 1024)
    assert piece_sizes(300) == (64, 128, 192, 256, 300)
    assert piece_sizes(40) == (40,)
