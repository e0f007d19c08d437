"""What is left out on a CPU, and what is not."""

from __future__ import annotations

from few_checks import ABOUT_PLANS, few

from enginery.testing.cases import AttnCase
from enginery.testing.conformance import RULES, Check, checks_of
from enginery.testing.subject import Subject


def checks() -> list[Check]:
    return checks_of(Subject.imported("core.testing.good_backend:GOOD", device="cpu"))


def numbers(checks: list[Check]) -> list[AttnCase]:
    return [check.case for check in checks if check.rule.name == "numbers" and check.case is not None]


def test_every_rule_is_left_unless_it_is_named() -> None:
    left = few(checks(), everything=False)
    assert {check.rule for check in left} == set(RULES)
    assert {rule.name for rule in RULES} - {check.rule.name for check in few(checks(), without=["numbers"], everything=False)} == {
        "numbers"
    }
    assert few(checks(), everything=True) == checks()
    assert len(left) < len(checks()) / 2


def test_every_value_and_every_recurrence_is_left() -> None:
    def met(cases: list[AttnCase]) -> set[tuple[object, ...]]:
        found = set[tuple[object, ...]]()
        for case in cases:
            rule = case.facts.recurrent
            if rule is None:
                facts = {**vars(case.facts), "page": case.page_size, "dtype": case.dtype, "strategy": case.strategy}
                found |= {(case.facts.latent is None, *item) for item in facts.items()}
            else:
                kernel = rule.rule if rule.rule in ("scan", "conv") else "matrix"
                found |= {(kernel, *item) for item in (*vars(rule).items(), ("dtype", case.dtype))}
                found |= {(rule.rule, rule.decay, rule.ssm, rule.gate_floor), (rule.decay, rule.key_heads, rule.value_heads)}
        return found

    assert met(numbers(few(checks(), everything=False))) == met(numbers(checks()))


def test_kinds_of_states_take_turns() -> None:
    def claims(checks: list[Check]) -> set[tuple[object, ...]]:
        rules = [check.case.facts.recurrent for check in checks if check.case is not None]
        return {(rule.rule, rule.decay) for rule in rules if rule is not None}

    left = [check for check in few(checks(), everything=False) if check.rule.name != "numbers"]
    assert claims(left) == claims(checks())


def test_of_rules_about_plans_there_is_one_case_and_kernels_take_turns() -> None:
    left = few(checks(), of_plans=ABOUT_PLANS, everything=False)
    cases = [check.case for check in left if check.rule.name in ABOUT_PLANS]
    assert len(cases) == len(ABOUT_PLANS)
    assert len({case.facts.recurrent and case.facts.recurrent.rule for case in cases if case is not None}) > 1
    assert numbers(left) == numbers(few(checks(), everything=False))
