"""What a rule is, how a check says that it is broken, and how far numbers may be from the formula."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import torch

from enginery.attention.watch import UnwrittenOutput, is_poison
from enginery.errors import Unsupported
from enginery.testing.cases import AttnCase
from enginery.testing.subject import Subject

# Of the largest magnitude of a request's expected results. Inputs are exact; in half precision the weights and the result are
# rounded once each, and MLA rounds the absorbed query, or the keys and values made from latents, as well. In float32 errors of
# that size are of the order of summation.
TOLERANCES: Final = {
    name: factor * torch.finfo(dtype).eps
    for name, dtype, factor in (("float32", torch.float32, 128), ("float16", torch.float16, 4), ("bfloat16", torch.bfloat16, 4))
}


class Fault(StrEnum):
    """How a rule was broken: in a word, for a report."""

    CRASH = "crash"
    UNWRITTEN = "nothing written"
    NAN = "NaN"
    DTYPE = "wrong dtype"
    NUMBERS = "wrong numbers"
    OTHER = "broken"


class BrokenRule(Exception):
    """A rule is broken. The message says what was seen and measured."""

    def __init__(self, message: str, fault: Fault = Fault.OTHER) -> None:
        super().__init__(message)
        self.fault = fault


class SkippedCheck(Exception):
    """A rule cannot be checked here. The message says why."""


# Of a check: it raises BrokenRule or SkippedCheck, and what it returns is a remark. None is the case of a rule about no one case.
# Any: a check takes an AttnCase, or None, as its scope gives it.
CheckFn = Callable[[Subject, Any], str | None]
Scope = Callable[[Subject], Sequence[AttnCase | None]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """name: stable, for machines. statement: what a backend must do. advice: for one that does not. scope: the cases to check."""

    name: str
    statement: str
    advice: str
    scope: Scope
    check: CheckFn


def rule(scope: Scope, advice: str) -> Callable[[CheckFn], Rule]:
    """Makes a check a rule, which has the name of the function and its docstring for a statement."""

    def make(check: CheckFn) -> Rule:
        name = check.__name__.replace("_", "-")
        return Rule(name=name, statement=inspect.getdoc(check) or "", advice=advice, scope=scope, check=check)

    return make


def fault_of(error: Exception) -> Fault:
    """Of an exception that a check raised: torch has no type of its own for operands whose dtypes do not fit."""
    if isinstance(error, BrokenRule | UnwrittenOutput):
        return error.fault if isinstance(error, BrokenRule) else Fault.UNWRITTEN
    text = "" if isinstance(error, Unsupported) else str(error).lower()  # refusals name dtypes
    return Fault.DTYPE if "dtype" in text or "scalar type" in text else Fault.CRASH


def compare(out: Iterable[torch.Tensor], expected: Sequence[torch.Tensor], *, dtype: str, what: str, leeway: float = 1.0) -> None:
    """Request by request. leeway: how many times what is allowed. Raises `BrokenRule` with the largest error."""
    allowed = TOLERANCES[dtype] * leeway
    for index, (got, wanted) in enumerate(zip(out, expected, strict=True)):
        if got.shape != wanted.shape:
            said = f"{what}: request {index} has shape {tuple(got.shape)} instead of {tuple(wanted.shape)}"
            raise BrokenRule(said, Fault.NUMBERS)
        if not wanted.numel():
            continue
        _check_written(got, f"{what}: request {index} of {len(expected)}")
        wanted = wanted.double().cpu()
        error = float((got.double().cpu() - wanted).abs().max() / wanted.abs().max())
        if not error <= allowed:
            said = f"{what}: request {index} of {len(expected)} is off by {error:.1e}, allowed is {allowed:.1e}"
            raise BrokenRule(said, Fault.NUMBERS)


def compare_lse(got: torch.Tensor, wanted: torch.Tensor, *, dtype: str, base: str, what: str) -> None:
    """The log-sum-exp of one piece, stated in `base`, with the natural one. Raises `BrokenRule`."""
    allowed = TOLERANCES[dtype] * max(1.0, float(wanted.abs().max()))
    factors = {"e": 1.0, "2": math.log(2.0)}
    errors = {each: float((got.double().cpu() * factor - wanted).abs().max()) for each, factor in factors.items()}
    if not errors.pop(base) <= allowed:
        ((other, error),) = errors.items()
        hint = f", but right in base {other}" if error <= allowed else ""
        raise BrokenRule(f"{what}: the log-sum-exp is wrong in base {base}, which capabilities state{hint}")


def _check_written(got: torch.Tensor, what: str) -> None:
    missing = is_poison(got)
    if bool(missing.any()):
        rows = int(missing.flatten(1).any(1).sum())
        raise BrokenRule(f"{what}: nothing is written to {rows} of {len(got)} rows of `out`", Fault.UNWRITTEN)
    if bool(got.isnan().any()):
        rows = int(got.isnan().flatten(1).any(1).sum())
        raise BrokenRule(f"{what}: {rows} of {len(got)} rows are NaN", Fault.NAN)


def raising(call: Callable[[], object], expected: type[Exception]) -> str | None:
    """None if `call` raises what is expected, else what it did instead."""
    try:
        call()
    except expected:
        return None
    except Exception as error:  # a backend's code
        return f"raises {type(error).__name__}: {error}"
    return "computes"
