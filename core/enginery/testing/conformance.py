"""The conformance kit: every rule on every case that a backend's capabilities claim."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final, Literal

from enginery.plugin.loading import explain
from enginery.testing.advice import advice_of
from enginery.testing.cases import AttnCase
from enginery.testing.check_claims import CLAIMS, hooks
from enginery.testing.check_numbers import NUMBERS
from enginery.testing.check_plans import PLANS
from enginery.testing.check_trees import TREES
from enginery.testing.rules import BrokenRule, Rule, SkippedCheck, fault_of
from enginery.testing.subject import Subject

_SLIPS: Final = (AttributeError, ImportError, NameError)  # of its author's, which the advice of no rule mends
RULES: Final = (hooks, *CLAIMS, *NUMBERS, *TREES, *PLANS)
Outcome = Literal["passed", "failed", "skipped"]
_NO_CASE: Final = "nothing that the backend serves calls for it"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rule on one case. message: what is wrong, why it was skipped, or a remark. fault: in a word. traits: of the case."""

    rule: str
    case: str
    outcome: Outcome
    message: str
    seconds: float
    fault: str = ""
    traits: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """All rows of one backend on one device."""

    backend: str
    device: str
    rows: Sequence[Row]

    def count(self, outcome: str) -> int:
        """How many rows have this outcome."""
        return sum(row.outcome == outcome for row in self.rows)

    def advice(self) -> list[str]:
        """For each rule and kind of fault, what the failing cases alone have in common, if there is something."""
        by_rule = {rule: [row for row in self.rows if row.rule == rule] for rule in dict.fromkeys(row.rule for row in self.rows)}
        return [f"{rule}, {said}" for rule, rows in by_rule.items() for said in advice_of(rows)]

    def as_data(self) -> dict[str, object]:
        """The report as values that JSON has."""
        return {"backend": self.backend, "device": self.device, "rows": [asdict(row) for row in self.rows]}


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
        start = time.perf_counter()
        outcome, message, fault = self._outcome(subject)
        return Row(
            rule=self.rule.name,
            case=str(self.case or ""),
            outcome=outcome,
            message=message,
            seconds=round(time.perf_counter() - start, 3),
            fault=fault,
            traits=self.case.traits if self.case is not None else {},
        )

    def _outcome(self, subject: Subject) -> tuple[Outcome, str, str]:
        """The outcome, its message and its fault."""
        if self.absent:
            return "skipped", self.absent, ""
        try:
            return "passed", self.rule.check(subject, self.case) or "", ""
        except SkippedCheck as skipped:
            return "skipped", str(skipped), ""
        except BrokenRule as broken:
            seen, fault = f"{broken}. {self.rule.advice}", broken.fault
        except _SLIPS as error:
            seen, fault = explain(error), fault_of(error)
        except Exception as error:  # a backend's code
            seen, fault = f"{explain(error)}. {self.rule.advice}", fault_of(error)
        where_said = f" ({self.case})" if self.case else ""
        return "failed", f"{self.rule.name}: {self.rule.statement}{where_said} Seen: {seen}", fault


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


def has_words(text: str, words: str) -> bool:
    """Whether all of the words, large or small, stand in the text."""
    return all(word in text.lower() for word in words.lower().split())


def run_conformance(
    subject: Subject,
    *,
    rules: Sequence[Rule] = RULES,
    only: str = "",
    stop_first: bool = False,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Report:
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
    return Report(backend=subject.offer.name, device=str(subject.device), rows=rows)
