"""Products that take the add and the norm before them: blocks of all kinds name the one that they begin with."""

from __future__ import annotations

from collections import Counter
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


def with_norming(registry: Registry, taken: Counter[int]) -> Registry:
    def bind(weight: torch.Tensor | StoredWeight, bias: torch.Tensor | None) -> LinearFn:
        return Norming(bind_linear(weight, bias), taken)

    return offering(registry, OpSpec, op_offer(op_spec({"bind_linear": bind}, api=(2, 3))))


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
