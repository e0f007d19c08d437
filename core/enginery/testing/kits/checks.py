"""Checks and reports of the smaller kits. What is checked is each kit's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from enginery.testing.report import Report, Row, has_words, run_check


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
        end = "\nThe other checks need this one; the command does not run them." if self.needed else ""
        return run_check(self.rule, self.case, self.run, failure=lambda _, said: f"{self}: {said}{end}", traits=self.traits)


@dataclass(frozen=True, kw_only=True)
class KitReport(Report):
    """All rows of one subject."""

    subject: str


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
