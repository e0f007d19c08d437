"""What kits report: a row for each check, and what failing cases have in common and passing ones lack.

"all 4 failures have soft cap 2.0, none of the 12 others".
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, Literal

from enginery.plugin.loading import explain
from enginery.testing.rules import BrokenRule, SkippedCheck, fault_of

Outcome = Literal["passed", "failed", "skipped"]
Traits = Mapping[str, str]
Pair = tuple[str, str]
_FEW: Final = 5  # one in so many passing cases may have the trait too, as cases without rows pass whatever is wrong


@dataclass(frozen=True, kw_only=True)
class Row:
    """One check. message: what is wrong, why it was skipped, or a remark. fault: in a word. traits: of the case."""

    rule: str
    case: str
    outcome: Outcome
    message: str
    seconds: float
    fault: str = ""
    traits: Traits = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """All rows of one subject."""

    rows: Sequence[Row]

    def count(self, outcome: str) -> int:
        """How many rows have this outcome."""
        return sum(row.outcome == outcome for row in self.rows)

    def advice(self) -> list[str]:
        """For each kind of fault, what the failing cases alone have in common, if there is something."""
        return advice_of(self.rows)

    def as_data(self) -> dict[str, object]:
        """The report as values that JSON has."""
        return asdict(self)


def run_check(
    rule: str, case: str, run: Callable[[], str | None], *, failure: Callable[[Exception, str], str], traits: Traits
) -> Row:
    """Never raises for what a plugin does. failure: makes the message of a row, of an error and what it says."""
    start, fault = time.perf_counter(), ""
    outcome: Outcome
    try:
        outcome, message = "passed", run() or ""
    except SkippedCheck as skipped:
        outcome, message = "skipped", str(skipped)
    except Exception as error:  # a plugin's code
        outcome, fault = "failed", fault_of(error)
        message = failure(error, str(error) if isinstance(error, BrokenRule) else explain(error))
    seconds = round(time.perf_counter() - start, 3)
    return Row(rule=rule, case=case, outcome=outcome, message=message, seconds=seconds, fault=fault, traits=traits)


def has_words(text: str, words: str) -> bool:
    """Whether all of the words, large or small, stand in the text."""
    return all(word in text.lower() for word in words.lower().split())


def advice_of(rows: Sequence[Row]) -> list[str]:
    """For each kind of fault, what the cases that fail with it alone have in common, if there is something."""
    passed = [row.traits for row in rows if row.outcome == "passed"]
    faults = dict.fromkeys(row.fault for row in rows if row.outcome == "failed")
    causes = {fault: common_cause([row.traits for row in rows if row.fault == fault], passed) for fault in faults}
    return [f"{fault}: {cause}" for fault, cause in causes.items() if cause]


def common_cause(failed: Sequence[Traits], passed: Sequence[Traits]) -> str:
    """The trait, or else the two together, that every failure has and no other case, or few others; empty if there is none.

    Nothing can be told where nothing passed, or where one case failed of which more than one trait is alone.
    """
    if not failed or not passed:
        return ""
    for size, most in ((1, 0), (2, 0), (1, len(passed) // _FEW)):
        counted = sorted((_count(passed, traits), index, traits) for index, traits in enumerate(_shared(failed, size)))
        found = [(count, traits) for count, _, traits in counted if count <= most]
        if len(found) == 1 or len(failed) > 1 <= len(found):
            count, traits = found[0]
            return f"{_said(traits, len(failed))}, {count or 'none'} of the {len(passed)} others"
    return ""


def _said(traits: Sequence[Pair], num_failed: int) -> str:
    count = "the one failure has" if num_failed == 1 else f"all {num_failed} failures have"
    return f"{count} {' and '.join(itertools.starmap(_text, traits))}"


def _shared(failed: Sequence[Traits], size: int) -> Iterator[tuple[Pair, ...]]:
    """The traits that all failures share, so many at a time. "any" stands for having a trait at all, with whatever value."""
    named = set.intersection(*(set(case.items()) | {(name, "any") for name in case} for case in failed))
    return itertools.combinations(sorted(named, key=lambda each: (each[1] == "any", each)), size)


def _count(cases: Iterable[Traits], traits: Sequence[Pair]) -> int:
    return sum(all(name in case and value in ("any", case[name]) for name, value in traits) for case in cases)


def _text(name: str, value: str) -> str:
    return f"a {name}" if value == "any" else f"{name} {value}".rstrip()
