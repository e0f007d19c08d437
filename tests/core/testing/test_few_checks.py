"""What is left out on a CPU, and what is not."""

from __future__ import annotations

from few_checks import few

from enginery.testing.conformance import RULES, Check, checks_of
from enginery.testing.subject import Subject


def recurrent(checks: list[Check]) -> list[Check]:
    return [check for check in checks if check.case is not None and check.case.facts.recurrent is not None]


def test_every_rule_and_every_value_with_every_recurrence_is_left() -> None:
    everything = checks_of(Subject.imported("core.testing.good_backend:GOOD", device="cpu"))
    left = few(everything, everything=False)
    assert {check.rule for check in left} == set(RULES)
    assert [check for check in everything if check not in recurrent(everything)] == [
        check for check in left if check not in recurrent(left)
    ]

    def met(checks: list[Check]) -> set[tuple[object, ...]]:
        cases = [check.case for check in recurrent(checks) if check.rule.name == "numbers"]
        facts = [(case.facts.recurrent, case.dtype) for case in cases]
        return {
            (rule.rule, rule.decay, name, value) for rule, dtype in facts for name, value in (*vars(rule).items(), ("dtype", dtype))
        }

    assert met(left) == met(everything)
    assert few(everything, everything=True) == everything


def test_kinds_of_states_take_turns() -> None:
    left = recurrent(few(checks_of(Subject.imported("core.testing.good_backend:GOOD", device="cpu")), everything=False))
    claims = {(check.case.facts.recurrent.rule, check.case.facts.recurrent.decay) for check in left if check.rule.name != "numbers"}
    everything = recurrent(checks_of(Subject.imported("core.testing.good_backend:GOOD", device="cpu")))
    assert claims == {(check.case.facts.recurrent.rule, check.case.facts.recurrent.decay) for check in everything}
