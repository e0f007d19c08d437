"""Checks and reports of the smaller kits. What is checked is each kit's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from enginery.plugin.loading import explain
from enginery.testing.advice import advice_of
from enginery.testing.conformance import Outcome, Row, has_words
from enginery.testing.rules import BrokenRule, SkippedCheck, fault_of


@dataclass(frozen=True, kw_only=True)
class KitCheck:
    """One check. run: raises `BrokenRule` or `SkippedCheck`; what it returns is a remark. traits: see `advice_of`.

    needed: the others need it; where it fails, they are not run.
    """

    rule: str
    case: str
    run: Callable[[], str | None]
    traits: Mapping[str, str] = field(default_factory=dict)
    needed: bool = False

    def __str__(self) -> str:
        return f"{self.rule}: {self.case}"

    def row(self) -> Row:
        """Run it. Never raises for what a plugin does."""
        start = time.perf_counter()
        outcome, message, fault = self._outcome()
        seconds = round(time.perf_counter() - start, 3)
        return Row(
            rule=self.rule, case=self.case, outcome=outcome, message=message, seconds=seconds, fault=fault, traits=self.traits
        )

    def _outcome(self) -> tuple[Outcome, str, str]:
        end = "\nThe other checks need this one; the command does not run them." if self.needed else ""
        try:
            return "passed", self.run() or "", ""
        except SkippedCheck as skipped:
            return "skipped", str(skipped), ""
        except BrokenRule as broken:
            return "failed", f"{self}: {broken}{end}", broken.fault
        except Exception as error:  # a plugin's code
            return "failed", f"{self}: {explain(error)}{end}", fault_of(error)


@dataclass(frozen=True, kw_only=True)
class KitReport:
    """All rows of one subject."""

    subject: str
    rows: Sequence[Row]

    def count(self, outcome: str) -> int:
        """How many rows have this outcome."""
        return sum(row.outcome == outcome for row in self.rows)

    def advice(self) -> list[str]:
        """For each kind of fault, what the failing cases alone have in common, if there is something."""
        return advice_of(self.rows)

    def as_data(self) -> dict[str, object]:
        """The report as values that JSON has."""
        return {"subject": self.subject, "rows": [asdict(row) for row in self.rows]}


def run_checks(
    subject: str,
    checks: Sequence[KitCheck],
    *,
    only: str = "",
    stop_first: bool = False,
    on_row: Callable[[Row], None] = lambda row: None,
) -> KitReport:
    """Run the checks that have all words of `only`. stop_first: end at the first failure. on_row: called with each row."""
    rows: list[Row] = []
    for check in (each for each in checks if has_words(str(each), only)):
        rows.append(check.row())
        on_row(rows[-1])
        if (stop_first or check.needed) and rows[-1].outcome == "failed":
            break
    return KitReport(subject=subject, rows=rows)
