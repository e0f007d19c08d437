"""How a kit's report is printed: a row for each rule, what failed, and what failures have in common."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from enginery.errors import Unsupported

if TYPE_CHECKING:
    from enginery.testing.report import Report, Row

_KIT: Final = "Kit"  # the panel of the help
OnlyFlag = Annotated[
    str,
    typer.Option("-k", metavar="WORDS", help="Run only checks whose rule and case have all of these words.", rich_help_panel=_KIT),
]
StopFlag = Annotated[bool, typer.Option("-x", "--stop-first", help="End at the first failure.", rich_help_panel=_KIT)]
ReportFlag = Annotated[bool, typer.Option("--json", help="Print the report as JSON.", rich_help_panel=_KIT)]
_COLOURS: Final = {"passed": "green", "failed": "red", "skipped": "yellow"}
_SHOWN: Final = 3  # failures of one kind


def check_device(device: str) -> None:
    """Raises `Unsupported` for a device that is not there."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise Unsupported(f"torch {torch.__version__} sees no CUDA device here; leave --device out to try it on the CPU")


@contextmanager
def watched(*, as_json: bool) -> Iterator[tuple[Console, Callable[[Row], None]]]:
    """A console, and what shows each row while the kit runs."""
    console = Console(highlight=False, stderr=as_json)
    with console.status("") as status:
        yield console, lambda row: status.update(f"{row.rule}: {row.case}")


def finish(console: Console, report: Report, name: str, *, as_json: bool) -> None:
    """Print the report. Exits with 1 if a check failed, or none was run."""
    if as_json:
        print(json.dumps(report.as_data(), indent=2))
    else:
        _show(console, report, name)
    if report.count("failed") or not report.rows:
        raise typer.Exit(1)


def _show(console: Console, report: Report, name: str) -> None:
    console.print(_counts(report))
    for outcome, text in (*_remarks(report), *_failures(report)):
        console.print(f"\n{text}", style=_COLOURS[outcome], markup=False, soft_wrap=True)
    for advice in report.advice():
        console.print(f"\n{advice}", style="bold", markup=False, soft_wrap=True)
    console.print(f"\n{name}: {_totals(report) if report.rows else 'no check has these words'}", markup=False, soft_wrap=True)


def _remarks(report: Report) -> Iterator[tuple[str, str]]:
    """The outcome of what did not fail, and what was said of it: once for all rules of which the same is said."""
    rules: dict[tuple[str, str], dict[str, None]] = {}
    for row in report.rows:
        if row.message and row.outcome != "failed":
            rules.setdefault((row.outcome, row.message), {})[row.rule] = None
    return ((outcome, f"{', '.join(names)} {outcome}: {message}") for (outcome, message), names in rules.items())


def _failures(report: Report) -> Iterator[tuple[str, str]]:
    """The first few of each rule and fault, and how many more there are."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for row in report.rows:
        if row.outcome == "failed":
            found.setdefault((row.rule, row.fault), {})[row.message] = None
    for (rule, fault), messages in found.items():
        yield from (("failed", f"[{fault}] {message}") for message in itertools.islice(messages, _SHOWN))
        if len(messages) > _SHOWN:
            yield "failed", f"[{fault}] {rule}: and {len(messages) - _SHOWN} more, which --json has"


def _totals(report: Report) -> str:
    """How many checks had which outcome, and how many which fault."""
    totals = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in _COLOURS)
    faults = Counter(row.fault for row in report.rows if row.outcome == "failed")
    return totals + (f" ({', '.join(f'{count} {fault}' for fault, count in faults.items())})" if faults else "")


def _counts(report: Report) -> Table:
    """A row for each rule: how many cases had which outcome."""
    table = Table(box=None, pad_edge=False)
    for column in ("rule", "passed", "failed", "skipped", "seconds"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    by_rule: dict[str, list[Row]] = {}
    for row in report.rows:
        by_rule.setdefault(row.rule, []).append(row)
    for rule, rows in by_rule.items():
        counts = Counter[str](row.outcome for row in rows)
        shown = [f"[{colour}]{counts[outcome]}[/]" if counts[outcome] else "" for outcome, colour in _COLOURS.items()]
        table.add_row(rule, *shown, f"{sum(row.seconds for row in rows):.1f}")
    return table
