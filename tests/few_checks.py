"""Fewer checks of the conformance kit where kernels are interpreted; on a CUDA device, and with ENGINERY_TESTS=full, all of them.

On a CPU the rule about numbers is tried on cases in which each recurrence meets each claimed value, and not any two values. Of
every other rule there is one case of each kernel: recurrences with a matrix for a state share one, and take turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pairwise import EVERYTHING

from enginery.testing.cases import AttnCase
from enginery.testing.conformance import Check

Facet = tuple[object, ...]


def few(checks: Sequence[Check], *, everything: bool = EVERYTHING) -> list[Check]:
    """Some of the checks, in the order of all."""
    if everything:
        return list(checks)
    kept, turn = [], itertools.count()
    for name, group in itertools.groupby(checks, key=lambda check: check.rule.name):
        of_rule = list(group)
        recurrent = [check for check in of_rule if check.case is not None and check.case.facts.recurrent is not None]
        if name == "numbers":
            chosen = _meeting_each_value(recurrent)
        else:
            matrices = [check for check in recurrent if _kernel(check.case) == "matrix"]
            chosen = [check for check in recurrent if _kernel(check.case) != "matrix"]
            chosen += [matrices[next(turn) % len(matrices)]] if matrices else []
        kept += [check for check in of_rule if check not in recurrent or check in chosen]
    return kept


def _kernel(case: AttnCase | None) -> str:
    assert case is not None
    assert case.facts.recurrent is not None
    rule = case.facts.recurrent.rule
    return rule if rule in ("scan", "conv") else "matrix"


def _facets(case: AttnCase | None) -> set[Facet]:
    """What a case has of each factor, with its recurrence."""
    assert case is not None
    assert case.facts.recurrent is not None
    facts = case.facts.recurrent
    form = (facts.rule, facts.decay, facts.ssm, facts.gate_floor, facts.conv_silu)
    values: list[object] = [form, facts.key_dim, facts.value_dim, facts.conv_kernel, case.dtype]
    heads = (*form, facts.key_heads, facts.value_heads)
    return {heads, *((facts.rule, facts.decay, place, value) for place, value in enumerate(values))}


def _meeting_each_value(checks: Sequence[Check]) -> list[Check]:
    """Greedy, the first first."""
    missing = set[Facet]().union(*(_facets(check.case) for check in checks))
    chosen = []
    while missing:
        best = max(checks, key=lambda check: len(_facets(check.case) & missing))
        missing -= _facets(best.case)
        chosen.append(best)
    return chosen
