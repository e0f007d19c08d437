"""Fewer checks of the conformance kit where kernels are interpreted or stood in for; on a CUDA device, and with
FULL_TESTS=1, all of them.

On a CPU the rule about numbers is tried on cases in which each kernel meets each recurrence and each claimed value, and not any two
values. Of every other rule there is one case of each kernel: what is alike shares one, and takes turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from pairwise import EVERYTHING

from enginery.contracts.memory import RecurrentFacts
from enginery.testing.cases import AttnCase
from enginery.testing.conformance import Check

Facet = tuple[object, ...]
ABOUT_PLANS = (
    *("attend-reads-nothing", "long-tail", "padded-equals-unpadded", "plan-a-plan-b-run-a"),
    *("planning-reads-nothing", "ragged-lengths", "same-attributes", "stale-plans"),
)

DEAR = ("padded-equals-unpadded",)  # runs four times, so with the second kernel: the first has a program for each head


def few(
    checks: Sequence[Check], *, without: Collection[str] = (), of_plans: Collection[str] = (), everything: bool = EVERYTHING
) -> list[Check]:
    """Some of the checks, in the order of all. without: names of rules that are left out. of_plans: of those about what kernels
    are given, where all of them are given the same: one case in all, and the kernels take turns."""
    if everything:
        return list(checks)
    kept, turn, kernel_turn = [], itertools.count(), itertools.count()
    for name, group in itertools.groupby(checks, key=lambda check: check.rule.name):
        of_rule = list(group) if name not in without else []
        chosen = []
        kernels = list(dict.fromkeys(_kernel(check.case) for check in of_rule if check.case is not None))
        if kernels and name in of_plans:
            place = 1 if name in DEAR else next(kernel_turn)
            kernels = [kernels[place % len(kernels)]]
        for kernel in kernels:
            alike = [check for check in of_rule if check.case is not None and _kernel(check.case) == kernel]
            chosen += _meeting_each_value(alike) if name == "numbers" else [alike[next(turn) % len(alike)]]
        kept += [check for check in of_rule if check.case is None or check in chosen]
    return kept


def _kernel(case: AttnCase) -> str:
    if case.facts.recurrent is None:
        return "softmax" if case.facts.latent is None else "latent"
    rule = case.facts.recurrent.rule
    return rule if rule in ("scan", "conv") else "matrix"


def _facets(case: AttnCase) -> set[Facet]:
    """What a case has of each factor. Decays are computed for each head, so they have the numbers of heads with them."""
    facts, rule = case.facts, case.facts.recurrent
    if rule is None:
        values = [(facts.num_heads, facts.num_kv_heads), facts.head_dim, facts.v_head_dim, facts.sliding_window, facts.softcap]
        values += [facts.sinks, facts.latent, case.page_size, case.dtype, case.strategy]
        return set(enumerate(values))
    form = (rule.rule, rule.decay, rule.ssm, rule.gate_floor, rule.conv_silu)
    values = [form, (rule.decay, rule.key_heads, rule.value_heads), rule.key_dim, rule.value_dim, rule.conv_kernel, case.dtype]
    return set(enumerate(values))


def _size(case: AttnCase) -> int:
    """How many programs of kernels there are to interpret, about: each has a recurrence's key dims in one tensor."""
    rule: RecurrentFacts | None = case.facts.recurrent
    return rule.value_heads * rule.value_dim if rule is not None else case.facts.num_heads * case.facts.head_dim


def _meeting_each_value(checks: Sequence[Check]) -> list[Check]:
    """Greedy: whatever adds most for the root of its size. Two small ones are cheaper than one with the largest of all values."""
    facets = {index: _facets(check.case) for index, check in enumerate(checks) if check.case is not None}
    sizes = {index: _size(check.case) for index, check in enumerate(checks) if check.case is not None}
    missing = set[Facet]().union(*facets.values())
    chosen = []
    while missing:
        best = max(facets, key=lambda index: len(facets[index] & missing) / sizes[index] ** 0.5)
        missing -= facets[best]
        chosen.append(checks[best])
    return chosen
