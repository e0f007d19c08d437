"""The table of operations from the references and the chosen plugins, and the checks of what these load.

A plugin's operation that is wrong would fail later, inside of a model or of another plugin; here it is told with its plugin's name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from enginery.contracts.ops import OpNeeds, OpSpec, OpTable, Routed, Routing
from enginery.errors import FAULTS, EnginError, PluginError
from enginery.kv.pool import TORCH_DTYPES
from enginery.nn.op_cases import OP_CASES, results_of
from enginery.nn.reference_ops import reference_ops
from enginery.plugin.boundary import inside
from enginery.plugin.loading import explain
from enginery.plugin.records import Offer
from enginery.plugin.selection import op_winners

RouteFn = Callable[[torch.Tensor, torch.Tensor | None, Routing], Routed]


def load_table(offers: Sequence[Offer[OpSpec]], needs: OpNeeds, device: torch.device) -> OpTable:
    """The references, overridden by what the offers load, the highest priority first.

    Raises `PluginError` that names the plugin for one that does not load exactly what it provides, loads what cannot be called as
    the reference is, or, on a CPU, gives results of another dtype or shape. On a CUDA device that would compile kernels that no
    model needs: see `blaming`.
    """
    table, references = vars(reference_ops()), vars(reference_ops())
    for offer in reversed(offers):
        loaded = load_ops(offer, needs)
        if problems := [problem for name in loaded if (problem := argument_problem(name, loaded[name], references[name]))]:
            raise PluginError("\n  - ".join([f"{offer.source} loads operations that cannot be used:", *problems]))
        if "route" in loaded and not offer.spec.narrow_logits:
            loaded = {**loaded, "route": widening(loaded["route"])}
        table = {**table, **loaded}
    if device.type == "cpu":
        check_results(table, offers, needs, device)
    return OpTable(**table)


def widening(route: RouteFn) -> RouteFn:
    """The same, given logits in float32 whatever comes."""
    return lambda logits, bias, routing: route(logits.float(), bias, routing)


def load_ops(offer: Offer[OpSpec], needs: OpNeeds) -> Mapping[str, Callable[..., Any]]:
    """What the plugin loads. Raises `PluginError` unless that is exactly what it provides."""
    with inside(offer, f"load the operations {offer.name!r}"):
        loaded = offer.spec.load(needs)
    if not isinstance(loaded, Mapping):
        raise PluginError(
            f"load of operations {offer.name!r}, from {offer.source}, returned {loaded!r:.100}, but must return a mapping"
        )
    declared = set(offer.spec.provides)
    if differing := declared ^ loaded.keys():
        said = [
            f"{name} is {'declared and not loaded' if name in declared else 'loaded and not declared'}"
            for name in sorted(differing)
        ]
        raise PluginError(f"operations {offer.name!r}, from {offer.source}: {'; '.join(said)}; `provides` and `load` must agree")
    return loaded


def argument_problem(name: str, function: object, reference: Callable[..., object]) -> str:
    """Why `function` cannot be called as the reference of the operation is; empty if it can, or cannot be told."""
    if not callable(function):
        return f"{name} is {function!r:.100}, which cannot be called"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function in C
        return ""
    wanted = inspect.signature(reference)
    keywords = {each.name: None for each in wanted.parameters.values() if each.kind is each.KEYWORD_ONLY}
    try:
        signature.bind(*[None] * (len(wanted.parameters) - len(keywords)), **keywords)
    except TypeError as error:
        shown = ", ".join([*(each for each in wanted.parameters if each not in keywords), *(f"{each}=" for each in keywords)])
        return f"{name} takes {signature}, and is called with ({shown}): {error}"
    return ""


def check_results(
    table: Mapping[str, Callable[..., Any]], offers: Sequence[Offer[OpSpec]], needs: OpNeeds, device: torch.device
) -> None:
    """Run each operation of a plugin once, on little. Raises `PluginError` for another dtype or shape than the reference's."""
    references, dtype = vars(reference_ops()), TORCH_DTYPES[needs.dtype]
    for name, offer in op_winners(offers).items():
        case = OP_CASES[name][0]
        with torch.inference_mode():
            wanted = results_of(references[name], case, dtype=dtype, device=device)
            with inside(offer, f"run its operation {name} ({case.name}, {needs.dtype})"):
                got = results_of(table[name], case, dtype=dtype, device=device)
        for part, tensor in wanted.items():
            if problem := difference(got[part], tensor):
                raise PluginError(f"operation {name}, from {offer.source}: {part} {problem} ({case.name}, {needs.dtype})")


def difference(got: object, wanted: torch.Tensor) -> str:
    """How the type, the dtype or the shape of a result is not the reference's; empty if they are."""
    if not isinstance(got, torch.Tensor):
        return f"is {got!r:.100}, which is no tensor"
    if got.dtype != wanted.dtype:
        return f"has dtype {got.dtype}, and must have {wanted.dtype}"
    return "" if got.shape == wanted.shape else f"has shape {tuple(got.shape)}, and must have {tuple(wanted.shape)}"


@contextmanager
def blaming(table: OpTable, offers: Sequence[Offer[OpSpec]], needs: OpNeeds, device: torch.device) -> Iterator[None]:
    """Run a model for the first time. If that fails and an operation is wrong, the error names the operation and its plugin."""
    try:
        yield
    except EnginError:
        raise
    except FAULTS as error:  # of a model, a backend or an operation
        try:
            check_results(vars(table), offers, needs, device)
        except PluginError as found:
            raise PluginError(f"{found}; the first step failed for it: {explain(error)}") from error
        raise
