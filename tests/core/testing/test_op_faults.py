"""Faults of operations at the edges of their inputs, which the kit finds: small rows, large gates, last columns, narrow memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from core.testing.test_kits import CPU, offer, tried

from enginery.contracts.ops import SamplingTensors
from enginery.nn import reference_ops
from enginery.testing.kits.checks import run_checks
from enginery.testing.kits.ops import checks_of_ops

NO_EPS = 1e-12
EPS_AT = {
    "rms_norm": 2,
    "add_rms_norm": 3,
    "gated_rms_norm": 3,
    "gated_group_norm": 3,
    "qk_norm_rotary": 2,
    "qk_norm_rotary_write": 2,
    "latent_norm_rotary_write": 3,
}


def without_eps(op: str) -> Callable[..., object]:
    """The reference with another eps than it is given."""
    function, place = vars(reference_ops.reference_ops())[op], EPS_AT[op]
    if op.endswith("_write"):
        return lambda *given, keys, values, slots: function(
            *given[:place], NO_EPS, *given[place + 1 :], keys=keys, values=values, slots=slots
        )
    return lambda *given: function(*given[:place], NO_EPS, *given[place + 1 :])


def latents_without_eps(q, latents, weight, eps, cos_sin, *, stored, slots) -> None:
    reference_ops.latent_norm_rotary_write(q, latents, weight, NO_EPS, cos_sin, stored=stored, slots=slots)


class NormingWithoutEps:
    """A product that takes the norm before it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.product = reference_ops.bind_linear(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return reference_ops.add_rms_norm(x, residual, weight, NO_EPS)


def rms_norm_in_half(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x * x).mean(-1, keepdim=True).add(eps).rsqrt() * weight


def silu_of_few_rows(x: torch.Tensor) -> torch.Tensor:
    return reference_ops.gated_silu(x).index_fill(0, torch.arange(64, max(64, len(x))), 0)


def silu_by_exp(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate * gate.exp() / (1 + gate.exp()) * up


def silu_of_small_gates(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=8)) * up


def gelu_by_erf(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def gelu_by_exp(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    grown = (2 * 0.7978845608028654 * (gate + 0.044715 * gate**3)).exp()
    return gate * grown / (1 + grown) * up


def gating_last(x, gate, weight, eps, gating, gate_first) -> torch.Tensor:
    return reference_ops.gated_group_norm(x, gate, weight, eps, gating, False)


def one_weight(x, gate, weight, eps, gating, gate_first) -> torch.Tensor:
    return reference_ops.gated_group_norm(x, gate, weight[:1].expand_as(weight), eps, gating, gate_first)


def sigmoid_by_exp(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * gate.exp() / (1 + gate.exp())


def keeping(more: int, op: str) -> Callable[..., torch.Tensor]:
    """So many tokens more than `top_k` says."""

    def draw(logits: torch.Tensor, draws: SamplingTensors) -> torch.Tensor:
        table = draws.table.clone()
        table[1] += more * (table[1] > 0)
        most = min(draws.most_kept + max(more, 0), logits.shape[1])
        return getattr(reference_ops, op)(logits, dataclasses.replace(draws, table=table, most_kept=most))

    return draw


def rounding_router(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.linear(x, weight).float()


def overflowing_write(qkv, weight, eps, cos_sin, *, keys, values, slots) -> None:
    first = qkv.shape[1] - keys.shape[1]
    reference_ops.qk_norm_rotary(qkv[:, :first], weight, eps, cos_sin)
    for stored, rows in ((keys, qkv[:, first - keys.shape[1] : first]), (values, qkv[:, first:])):
        if stored.dtype.itemsize == 1:  # as GPUs and some versions of torch round what is too large
            rows = rows.masked_fill(rows.abs() > 464, float("nan"))
        whole = stored.to(qkv.dtype).index_copy_(0, slots, rows)
        stored.copy_(whole.to(stored.dtype))


@pytest.mark.parametrize(
    ("op", "function", "case", "fault"),
    [
        *((op, without_eps(op), "rows 5, ", "wrong numbers") for op in ("add_rms_norm", "gated_rms_norm", "gated_group_norm")),
        ("gated_group_norm", gating_last, "gate_first True", "wrong numbers"),
        ("gated_group_norm", one_weight, "rows 33, ", "wrong numbers"),
        ("rms_norm", without_eps("rms_norm"), "shape 5x768, ", "wrong numbers"),
        ("rms_norm", lambda x, weight, eps: reference_ops.rms_norm(x, weight, 0), "shape 5x768, ", "NaN"),
        *((op, without_eps(op), "rows 2, ", "wrong numbers") for op in ("qk_norm_rotary", "qk_norm_rotary_write")),
        ("latent_norm_rotary_write", latents_without_eps, "rows 2, ", "wrong numbers"),
        ("bind_linear", NormingWithoutEps, "rows 1, ", "wrong numbers"),
        ("gated_silu", silu_of_few_rows, "rows 257, ", "wrong numbers"),
        ("gated_silu", silu_by_exp, "gates 60.0, ", "NaN"),
        ("gated_silu", silu_of_small_gates, "gates 60.0, ", "wrong numbers"),
        ("gated_gelu", gelu_by_erf, "rows 5, size 768", "wrong numbers"),
        ("gated_gelu", gelu_by_exp, "gates 60.0, ", "NaN"),
        ("gated_sigmoid", sigmoid_by_exp, "gates 60.0, ", "NaN"),
        ("sample_rows", keeping(1, "sample_rows"), "place 0.01, ", "wrong numbers"),
        ("sample_rows", keeping(1, "sample_rows"), "place 0.99, ", "wrong numbers"),
        *(("draw_rows", keeping(more, "draw_rows"), "size 64, cuts 1.0x5x1.0x0.0", "wrong numbers") for more in (1, -1)),
        ("greedy", lambda logits: logits[:, :-1].argmax(-1), "rows 2, ", "wrong numbers"),
        ("bind_router", rounding_router, "bfloat16", "wrong numbers"),
        ("qk_norm_rotary_write", overflowing_write, "float8 True, ", "NaN"),
    ],
)
def test_a_fault_at_the_edges_of_an_operation_is_found(op: str, function, case: str, fault: str) -> None:
    rows = [row for row in tried(**{op: function}).rows if row.outcome == "failed"]
    assert {row.fault for row in rows if case in row.case} == {fault}, [row.message for row in rows]


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_a_norm_that_squares_large_numbers_in_half_precision_is_found(op: str) -> None:
    def add_rms_norm_in_half(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm_in_half(residual.add_(x), weight, eps)

    function = {"rms_norm": rms_norm_in_half, "add_rms_norm": add_rms_norm_in_half}[op]
    report = run_checks("mine", checks_of_ops(offer(**{op: function}), device=CPU, dtypes=("float16",)))
    assert [row.case for row in report.rows if row.outcome == "failed" and "scale 512.0" in row.case]
