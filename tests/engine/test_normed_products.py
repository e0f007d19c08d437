"""Products that take the add and the norm before them, or the gate behind them: blocks name the one that they begin with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine.rank_answers import ASKED, PROMPTS, assert_equal, folder_of, options
from engine.rank_pair import request, serve
from engine.rank_threads import on_threads
from offers import offering, op_offer, op_spec

from enginery.api import LinearFn, OpSpec, StoredWeight
from enginery.engine.engine import Engine
from enginery.nn import decoder
from enginery.nn.reference_ops import bind_linear, rms_norm
from enginery.plugin.registry import Registry
from enginery.worker.weights import rank


class Norming:
    """A product that takes the norm of one row, and makes its own result with it. taken: by all of them, how often each norm."""

    def __init__(self, product: LinearFn, taken: Counter[int]) -> None:
        self.product, self.taken = product, taken
        self.made: tuple[torch.Tensor, torch.Tensor] | None = None

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
        if len(x) != 1:
            return None
        residual.set_(residual + x)
        normed = rms_norm(residual, weight, eps)
        self.made = normed, self.product(normed)
        self.taken[weight.data_ptr()] += 1
        return normed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        made, self.made = self.made, None
        return made[1] if made is not None and made[0] is x else self.product(x)


class Gatable(Norming):
    """One that takes the gate behind it too. calls: of all gated ones."""

    def __init__(self, product: LinearFn, taken: Counter[int], calls: Counter[int]) -> None:
        super().__init__(product, taken)
        self.calls, self.is_gated = calls, False

    def with_gate(self, gated_silu: Callable[[torch.Tensor], torch.Tensor]) -> LinearFn:
        def gated(x: torch.Tensor) -> torch.Tensor:
            self.calls[id(self)] += 1
            return gated_silu(self.product(x))

        self.is_gated = True
        return Norming(gated, self.taken)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
        assert not self.is_gated, "what it returned is asked"
        return super().add_rms_norm(x, residual, weight, eps)


def with_norming(registry: Registry, taken: Counter[int], calls: Counter[int] | None = None) -> Registry:
    """calls: of products that take gates, where they do."""

    def bind(weight: torch.Tensor | StoredWeight, bias: torch.Tensor | None) -> LinearFn:
        product = bind_linear(weight, bias)
        return Norming(product, taken) if calls is None else Gatable(product, taken, calls)

    return offering(registry, OpSpec, op_offer(op_spec({"bind_linear": bind}, api=(2, 4))))


# Of four layers, twice of two of LongCat's; those of wide routers are not counted, nor MiniMax' before its experts.
@pytest.mark.parametrize(
    ("family", "count"),
    [
        *(("llama", 7), ("gemma2", 7), ("gpt-oss", 7), ("qwen3_next", 7), ("jamba", 7)),
        *(("kimi_linear", 4), ("deepseek-v2-lite-experts", 4), ("longcat-flash", 5), ("minimax", 3)),
    ],
)
def test_a_product_takes_the_norm_before_it(registry: Registry, tmp_path: Path, family: str, count: int) -> None:
    """Of decoding steps of one request. The first layer's attention adds nothing, so its norm is no sum's."""
    first, second = request("greedy", PROMPTS[0], **ASKED["greedy"]), request("seeded", PROMPTS[1], **ASKED["seeded"])
    asked, taken = options(model=folder_of(tmp_path, family)), Counter[int]()
    plain, engine = Engine.build(asked, registry), Engine.build(asked, with_norming(registry, taken))
    assert_equal(serve(engine, [first]), serve(plain, [first]))
    steps = len(serve(plain, [first])["greedy"].tokens) - 1
    assert set(taken.values()) <= {steps, steps + 1}, "each in all that decode, the last one with the prompt's last row too"
    assert len(taken) == count
    taken.clear()
    assert_equal(serve(engine, [first, second]), serve(plain, [first, second]))


def test_what_takes_norms_is_known_when_a_model_is_built(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a product has a protocol's methods takes 7 us to find, of which an eager step of 60 layers would have 2 ms."""
    engine = Engine.build(options(model=folder_of(tmp_path, "llama")), with_norming(registry, taken := Counter[int]()))
    for module in (decoder, rank):
        monkeypatch.setattr(module, "NormingLinear", None)
    serve(engine, [request("greedy", PROMPTS[0], **ASKED["greedy"])])
    assert taken


def test_sums_of_several_ranks_are_normed_where_they_were(registry: Registry, tmp_path: Path) -> None:
    taken = Counter[int]()
    asked = options(model=folder_of(tmp_path, "llama"), tp=2)
    with on_threads(asked, with_norming(registry, taken)) as (engine, _):
        serve(engine, [request("greedy", PROMPTS[0], **ASKED["greedy"])])
    assert not taken


# Products of gates and ups that SiLU follows, of four layers. Experts have kernels of their own, shared ones among them.
@pytest.mark.parametrize(("family", "count"), [("llama", 4), ("gemma2", 0), ("deepseek-v2-lite-experts", 1), ("falcon_h1", 4)])
def test_a_product_takes_the_gate_behind_it(registry: Registry, tmp_path: Path, family: str, count: int) -> None:
    first, second = request("greedy", PROMPTS[0], **ASKED["greedy"]), request("seeded", PROMPTS[1], **ASKED["seeded"])
    asked, taken, calls = options(model=folder_of(tmp_path, family)), Counter[int](), Counter[int]()
    plain, engine = Engine.build(asked, registry), Engine.build(asked, with_norming(registry, taken, calls))
    before = Counter(calls)
    assert_equal(serve(engine, [first, second]), serve(plain, [first, second]))
    assert len(calls - before) == count


def test_what_takes_the_gate_takes_the_norm_too(registry: Registry, tmp_path: Path) -> None:
    first = request("greedy", PROMPTS[0], **ASKED["greedy"])
    asked, taken, calls = options(model=folder_of(tmp_path, "llama")), Counter[int](), Counter[int]()
    plain, engine = Engine.build(asked, registry), Engine.build(asked, with_norming(registry, taken, calls))
    assert_equal(serve(engine, [first]), serve(plain, [first]))
    assert len(taken) == 7, "as many as where products take no gates"


def test_ranks_take_gates_of_their_parts(registry: Registry, tmp_path: Path) -> None:
    calls = Counter[int]()
    asked = options(model=folder_of(tmp_path, "llama"), tp=2)
    first = request("greedy", PROMPTS[0], **ASKED["greedy"])
    plain = Engine.build(options(model=folder_of(tmp_path, "llama")), registry)
    with on_threads(asked, with_norming(registry, Counter(), calls)) as (engine, _):
        before = Counter(calls)
        assert_equal(serve(engine, [first]), serve(plain, [first]))
    assert len(calls - before) == 2 * 4
