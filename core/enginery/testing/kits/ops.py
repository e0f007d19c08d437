"""The kit for operations: each one that a plugin provides against the core's reference, over shapes and dtypes.

An error is measured against the reference in float64 on the same rounded inputs, relative to its largest number. Allowed is what
`TOLERANCES` says of the result's dtype, or twice the error of the reference in the dtype itself, whichever is more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from enginery.contracts.ops import OpNeeds, OpSpec
from enginery.contracts.versions import HookGroup
from enginery.errors import ConfigError, Unsupported
from enginery.kv.pool import TORCH_DTYPES
from enginery.nn.op_cases import OP_CASES, OpCase, Results, results_of, stored_cases
from enginery.nn.reference_ops import reference_ops
from enginery.plugin.records import Offer
from enginery.plugin.registry import Registry
from enginery.plugin.selection import refusals
from enginery.testing.kits.checks import KitCheck
from enginery.testing.readback import no_reads
from enginery.testing.rules import TOLERANCES, BrokenRule, Fault, SkippedCheck
from enginery.worker.op_table import argument_problem, difference, load_ops

if TYPE_CHECKING:  # `engine test-op` runs where there is no pytest
    import pytest

DTYPES: Final = ("float32", "bfloat16", "float16")


def op_checks(name: str, registry: Registry, *, device: str = "cpu", dtypes: Sequence[str] = DTYPES) -> list[KitCheck]:
    """The checks of the set `name`. Raises `PluginError` for an unknown name, `ConfigError` for dtypes, `Unsupported` from it."""
    if unknown := set(dtypes) - set(DTYPES):
        raise ConfigError(f"the dtype is {' and '.join(sorted(unknown))}, but must be one of {', '.join(DTYPES)}")
    offer = registry.named(OpSpec, name, "set of operations")
    return checks_of_ops(offer, device=torch.device(device), dtypes=dtypes)


def op_checks_of_spec(spec: OpSpec, *, device: str = "cpu", dtypes: Sequence[str] = DTYPES) -> list[KitCheck]:
    """The same of a set that no installed plugin offers yet."""
    offer = Offer(spec=spec, group=HookGroup.OP, name=spec.name, plugin=spec.name, distribution=spec.name, version="0")
    return checks_of_ops(offer, device=torch.device(device), dtypes=dtypes)


def checks_of_ops(offer: Offer[OpSpec], *, device: torch.device, dtypes: Sequence[str] = DTYPES) -> list[KitCheck]:
    """A check for each dtype that is not refused, operation and case, and one for what is loaded. Raises `Unsupported`."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    needs = {each: OpNeeds(device=device.type, dtype=each, compute_capability=capability) for each in dtypes}
    refused = {dtype: refusals(offer, each) for dtype, each in needs.items()}
    if all(refused.values()):
        reasons = dict.fromkeys(reason.text for reasons in refused.values() for reason in reasons)
        raise Unsupported(f"operations {offer.name!r}, from {offer.source}, refuse {device.type}: {'; '.join(reasons)}")
    checks = []
    for dtype, against in refused.items():
        if against:
            why = "; ".join(reason.text for reason in against)
            checks.append(KitCheck(rule="served", case=dtype, run=functools.partial(_skip, f"it refuses {dtype}: {why}")))
            continue
        checks.append(KitCheck(rule="loads", case=dtype, run=functools.partial(_loads, offer, needs[dtype]), needed=True))
        checks += _of_dtype(offer, needs[dtype], device)
    return checks


def _of_dtype(offer: Offer[OpSpec], needs: OpNeeds, device: torch.device) -> Iterator[KitCheck]:
    for op in offer.spec.provides:
        cases = list(OP_CASES[op])
        for scheme in sorted(offer.spec.schemes.get(op, ()), key=str):  # of what a plugin is given in a format
            try:
                cases += stored_cases(op, scheme)
            except Unsupported as without:
                yield KitCheck(rule=op, case=f"{scheme}, {needs.dtype}", run=functools.partial(_skip, str(without)))
        for case in cases:
            run = functools.partial(_equals_reference, offer, op, case, needs=needs, device=device)
            traits = {"operation": op, "dtype": needs.dtype, **case.traits}
            yield KitCheck(rule=op, case=f"{case.name}, {needs.dtype}", run=run, traits=traits)


def _skip(why: str) -> None:
    raise SkippedCheck(why)


def _loads(offer: Offer[OpSpec], needs: OpNeeds) -> None:
    """`load` gives what `provides` says, with the reference's arguments."""
    loaded, references = load_ops(offer, needs), vars(reference_ops())
    if problems := [problem for name in loaded if (problem := argument_problem(name, loaded[name], references[name]))]:
        raise BrokenRule("; ".join(problems))


def _equals_reference(offer: Offer[OpSpec], op: str, case: OpCase, *, needs: OpNeeds, device: torch.device) -> None:
    """Numbers, dtypes, shapes, what is written in place, and that what can be recorded on a CPU reads nothing back."""
    dtype, reference = TORCH_DTYPES[needs.dtype], vars(reference_ops())[op]
    with torch.inference_mode():
        ours = load_ops(offer, needs)[op]
        if device.type == "cpu" and offer.spec.record_calls is not None and not op.startswith("bind_"):  # what is bound may look
            ours = functools.partial(_unread, ours)
        got = results_of(ours, case, dtype=dtype, device=device)
        same = results_of(reference, case, dtype=dtype, device=device)
        exact = results_of(reference, case, dtype=dtype, device=device, wide=True)
    for part in same:
        _compare(part, got=got, same=same, exact=exact, dtype=needs.dtype)


def _unread(op: Callable[..., object], *args: object, **named: object) -> object:
    with no_reads(torch.device("cpu")):
        return op(*args, **named)


def _compare(part: str, *, got: Results, same: Results, exact: Results, dtype: str) -> None:
    ours, theirs = got[part], same[part]
    if problem := difference(ours, theirs):
        is_dtype = isinstance(ours, torch.Tensor) and ours.dtype != theirs.dtype
        raise BrokenRule(f"{part} {problem}", Fault.DTYPE if is_dtype else Fault.OTHER)
    if part.endswith("ids"):
        if wrong := int((ours.cpu() != theirs.cpu()).sum()):
            raise BrokenRule(f"{part}: {wrong} of {ours.numel()} are others than the reference's", Fault.NUMBERS)
        return
    if not ours.numel():
        return
    tolerance = _tolerance(part, theirs.dtype, dtype)
    ours, theirs, wanted = ours.double(), theirs.double(), exact[part].double()
    if bool(ours.isnan().any()):
        raise BrokenRule(f"{part}: {int(ours.isnan().sum())} of {ours.numel()} numbers are NaN", Fault.NAN)
    largest = max(float(wanted.abs().max()), 1e-30)
    error, of_reference = (float((each - wanted).abs().max()) / largest for each in (ours, theirs))
    allowed = max(tolerance, 2 * of_reference)
    if not error <= allowed:
        raise BrokenRule(f"{part} is off by {error:.1e} of its largest number, allowed is {allowed:.1e}", Fault.NUMBERS)


def _tolerance(part: str, of_result: torch.dtype, dtype: str) -> float:
    """Of the result's dtype, but for products of a norm, which was rounded to `dtype` before."""
    return TOLERANCES[dtype] if part.endswith("of it") else TOLERANCES.get(str(of_result).removeprefix("torch."), TOLERANCES[dtype])


class OpSuite:
    """The kit as pytest tests, one for each check: a subclass with `ops`, as `OpSpec.name` says, is all that a plugin needs."""

    ops: ClassVar[str]
    device: ClassVar[str] = "cpu"

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Called by pytest for each subclass."""
        import pytest

        if "op_check" not in metafunc.fixturenames:
            return
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            absent = pytest.param(None, marks=pytest.mark.skip(reason="there is no CUDA device"))
            metafunc.parametrize("op_check", [absent])
            return
        checks = op_checks(self.ops, Registry.load(), device=self.device)
        metafunc.parametrize("op_check", [pytest.param(check, id=str(check)) for check in checks])

    def test_operation(self, op_check: KitCheck) -> None:
        """A check that does not apply is a skipped test, with the reason."""
        import pytest

        row = op_check.row()
        if row.outcome == "skipped":
            pytest.skip(row.message)
        assert row.outcome == "passed", row.message
