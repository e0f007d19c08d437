"""The conformance kit: every rule on every case that a backend's capabilities claim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from enginery.errors import PluginError
from enginery.testing.cases import AttnCase
from enginery.testing.check_claims import CLAIMS, hooks
from enginery.testing.check_numbers import NUMBERS
from enginery.testing.check_plans import PLANS
from enginery.testing.check_trees import TREES
from enginery.testing.report import Report, Row, advice_of, has_words, run_check
from enginery.testing.rules import Rule, SkippedCheck
from enginery.testing.subject import Subject

_SLIPS: Final = (AttributeError, ImportError, NameError, TypeError)  # of its author's, which no rule's advice mends
RULES: Final = (hooks, *CLAIMS, *NUMBERS, *TREES, *PLANS)
_NO_CASE: Final = "nothing that the backend serves calls for it"


@dataclass(frozen=True, kw_only=True)
class BackendReport(Report):
    """All rows of one backend on one device."""

    backend: str
    device: str

    def advice(self) -> list[str]:
        """For each rule and kind of fault, what the failing cases alone have in common, if there is something."""
        by_rule = {rule: [row for row in self.rows if row.rule == rule] for rule in dict.fromkeys(row.rule for row in self.rows)}
        return [f"{rule}, {said}" for rule, rows in by_rule.items() for said in advice_of(rows)]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A rule on a case, or the reason why there is none."""

    rule: Rule
    case: AttnCase | None
    absent: str = ""

    def __str__(self) -> str:
        return f"{self.rule.name}: {self.case or self.absent or 'the whole'}"

    def run(self, subject: Subject) -> Row:
        """Never raises for what a backend does."""
        traits = {} if self.case is None else self.case.traits
        return run_check(self.rule.name, str(self.case or ""), lambda: self._checked(subject), failure=self._failure, traits=traits)

    def _checked(self, subject: Subject) -> str | None:
        if self.absent:
            raise SkippedCheck(self.absent)
        return self.rule.check(subject, self.case)

    def _failure(self, error: Exception, said: str) -> str:
        where = f" ({self.case})" if self.case else ""
        advice = "" if isinstance(error, _SLIPS) or type(error) is PluginError else f". {self.rule.advice}"
        return f"{self.rule.name}: {self.rule.statement}{where} Seen: {said}{advice}"


def checks_of(subject: Subject, *, rules: Sequence[Rule] = RULES) -> list[Check]:
    """Every rule has one check at least; a rule that does not apply says why."""
    checks = []
    for rule in rules:
        try:
            cases = rule.scope(subject)
        except SkippedCheck as reason:
            checks.append(Check(rule=rule, case=None, absent=str(reason)))
            continue
        checks += [Check(rule=rule, case=case) for case in cases] or [Check(rule=rule, case=None, absent=_NO_CASE)]
    return checks


def run_conformance(
    subject: Subject,
    *,
    rules: Sequence[Rule] = RULES,
    only: str = "",
    stop_first: bool = False,
    on_row: Callable[[Row], None] = lambda row: None,
) -> BackendReport:
    """Run every check. If the hooks are wrong, nothing else is run. on_row: called with each row as it comes.

    only: words that must stand in a check's `rule: case`; the hooks are checked all the same. stop_first: end at the first failure.
    """
    rows: list[Row] = []
    chosen = [each for each in checks_of(subject, rules=rules) if each.rule is hooks or has_words(str(each), only)]
    failures: set[str] = set()
    for check in chosen:
        if hooks.name in failures and check.rule is not hooks:
            check = replace(check, absent=f"the rule {hooks.name} is broken")
        rows.append(row := check.run(subject))
        on_row(row)
        failures |= {row.rule} if row.outcome == "failed" else set()
        if stop_first and failures:
            break
    return BackendReport(backend=subject.offer.name, device=str(subject.device), rows=rows)
