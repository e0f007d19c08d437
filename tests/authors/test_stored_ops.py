"""The kit for operations on weights that are stored in a format: those that a set says it takes, and wrong kernels are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from offers import op_spec

from enginery.api import LinearFn, OpSpec, Scheme, StoredWeight
from enginery.nn.reference_experts import bind_experts
from enginery.nn.reference_ops import bind_linear
from enginery.nn.stored import FLOAT8_BLOCKS, widen
from enginery.testing.conformance import Row
from enginery.testing.kits.ops import op_checks_of_spec

PER_ROW = Scheme(values="f8e4m3", block=(1, 0))
WHOLE = Scheme(values="i8", block=(1, 0))
SQUEEZED = Scheme(values="i4", block=(1, 128), zeros=True)


def spec(schemes: dict[str, frozenset[Scheme]], **functions: Callable[..., Any]) -> OpSpec:
    return op_spec(functions, schemes=schemes)


def rows_of(of: OpSpec) -> list[Row]:
    return [check.row() for check in op_checks_of_spec(of, dtypes=("float32", "bfloat16"))]


def scales_forgotten(weight: torch.Tensor | StoredWeight, bias: torch.Tensor | None) -> LinearFn:
    if isinstance(weight, StoredWeight):
        weight = weight.values.to(torch.float32)
        return lambda x: F.linear(x, weight.to(x.dtype), bias)
    return bind_linear(weight, bias)


def last_blocks_forgotten(weight: torch.Tensor | StoredWeight, bias: torch.Tensor | None) -> LinearFn:
    if not isinstance(weight, StoredWeight):
        return bind_linear(weight, bias)
    rows, columns = (size // 128 * 128 for size in weight.values.shape)
    wide = widen(weight, torch.float32)
    wide[rows:], wide[:, columns:] = 0, 0
    return lambda x: F.linear(x, wide.to(x.dtype), bias)


@pytest.mark.parametrize("scheme", [FLOAT8_BLOCKS, PER_ROW, WHOLE], ids=str)
def test_the_references_keep_what_a_set_claims_of_stored_weights(scheme: Scheme) -> None:
    claimed = {name: frozenset({scheme}) for name in ("bind_linear", "bind_experts")}
    rows = rows_of(spec(claimed, bind_linear=bind_linear, bind_experts=bind_experts))
    assert [row.message for row in rows if row.outcome != "passed"] == []
    for name, num_cases in (("bind_linear", 4), ("bind_experts", 5)):
        assert len([row for row in rows if row.rule == name and f"scheme {scheme}" in row.case]) == 2 * num_cases


@pytest.mark.parametrize(("wrong", "num_failed"), [(scales_forgotten, 6), (last_blocks_forgotten, 2)])
def test_wrong_kernels_for_them_are_found(wrong: Callable[..., LinearFn], num_failed: int) -> None:
    rows = rows_of(spec({"bind_linear": frozenset({FLOAT8_BLOCKS})}, bind_linear=wrong))
    failed = [row for row in rows if row.outcome == "failed"]
    assert all(f"scheme {FLOAT8_BLOCKS}" in row.case for row in failed)
    assert len(failed) == num_failed


def test_what_is_not_claimed_is_not_tried_and_what_has_no_reference_is_skipped_with_the_reason() -> None:
    assert not [row for row in rows_of(spec({}, bind_linear=bind_linear)) if "scheme" in row.case]
    rows = rows_of(spec({"bind_linear": frozenset({SQUEEZED})}, bind_linear=bind_linear))
    skipped = [row for row in rows if row.outcome == "skipped"]
    assert [row.message for row in skipped] == [
        f"the core has no reference for weights in {SQUEEZED}; a plugin's kernels have to take them"
    ] * 2
