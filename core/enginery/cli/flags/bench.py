"""What becomes of a benchmark's report: a table, JSON, a file, and a comparison with an earlier one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from enginery.bench.report import Change, Report, ReportedRow, read_report
from enginery.bench.report import compare as compare_reports
from enginery.cli.flags.signature import option, parameters_of, with_signature
from enginery.cli.tables import console, print_paragraph, print_table, table_width
from enginery.errors import ConfigError

_PANEL: Final = "Report"
_IN_CACHE: Final = "in cache: faster than memory, because what was read stayed in a cache; --full takes more than caches hold"


def with_report_flags(command: Callable[..., Report]) -> Callable[..., None]:
    """Give a command that returns a report the flags for what becomes of it."""

    def run(
        *given: object,
        as_json: Annotated[bool, option(_PANEL, "Print the report as JSON.", "--json")] = False,
        output: Annotated[Path | None, option(_PANEL, "Write the report as JSON to this file too.")] = None,
        compare: Annotated[Path | None, option(_PANEL, "An --output from before; exits with 1 if something got slower.")] = None,
        tolerance: Annotated[float, option(_PANEL, "With --compare: the share by which times may grow.", min=0)] = 0.05,
        **named: object,
    ) -> None:
        before = None if compare is None else read_report(compare, bench=command.__name__)
        if output is not None:
            _check_writable(output)
        report = command(*given, **named)
        data = json.dumps(report, indent=1)
        if output is not None:
            output.write_text(data + "\n")
        if as_json:
            typer.echo(data)
        else:
            show(report)
        is_slower = before is not None and show_changes(compare_reports(before, report), tolerance, on_stderr=as_json)
        if is_slower or any(_detail(row, "errors") for row in report["rows"]):
            raise typer.Exit(1)

    flags = [parameter for parameter in parameters_of(run) if parameter.kind is parameter.KEYWORD_ONLY]
    return with_signature(command, [*parameters_of(command), *flags], run)


def _check_writable(output: Path) -> None:
    if output.is_dir() or not os.access(output if output.exists() else output.parent, os.W_OK):
        raise ConfigError(f"--output {output} cannot be written; name a file in a folder that is there and is yours to write")


def show(report: Report) -> None:
    """Print a row per measurement, or a column where rows are too wide; then failures, phases of a start, the device's limits."""
    out, rows = console(), report["rows"]
    shared = _shared([row["what"] for row in rows])
    if shared:
        out.print(", ".join(f"{_heading(name)} {value}" for name, value in shared.items()), markup=False)
    _print_rows(out, [_shown(row, leave_out=shared) for row in rows])
    if any(row["details"].get("in_cache") for row in rows):
        print_paragraph(out, _IN_CACHE)
    for row in rows:
        _print_details(out, row)
    for limits in report["limits"]:
        known = ", ".join(f"{_heading(name)} {_cell(name, value)}" for name, value in limits.items())
        print_paragraph(out, f"{report['device']}: {known}")


def _shared(facts: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """The facts that are the same in every row, if there are several rows."""
    if len(facts) < 2:
        return {}
    return {name: value for name, value in facts[0].items() if all(what.get(name) == value for what in facts)}


def _shown(row: ReportedRow, *, leave_out: Collection[str]) -> dict[str, object]:
    cells = {name: value for name, value in {**row["what"], **row["measured"], **row["derived"]}.items() if name not in leave_out}
    return cells | ({"fraction": "in cache"} if row["details"].get("in_cache") else {})


def _print_details(out: Console, row: ReportedRow) -> None:
    for error, count in _detail(row, "errors").items():
        print_paragraph(out, f"{count} times: {error}")
    if phases := _detail(row, "phases_s"):
        _print_rows(out, [{"phase": name, "median_s": seconds} for name, seconds in phases.items()])


def _detail(row: ReportedRow, name: str) -> Mapping[str, object]:
    found = row["details"].get(name)
    return found if isinstance(found, Mapping) else {}


def show_changes(changes: Sequence[Change], tolerance: float, *, on_stderr: bool) -> bool:
    """Print the changes. Returns whether a time grew by more than this share."""
    slower = [change["after"] > change["before"] * (1 + tolerance) for change in changes]
    rows = [
        {
            **change,
            "speed": f"{change['before'] / change['after']:.3f}" if change["after"] else "-",
            "": "slower" if is_slower else "",
        }
        for change, is_slower in zip(changes, slower, strict=True)
    ]
    out = console(stderr=on_stderr)
    _print_rows(out, rows)
    out.print(f"{sum(slower)} of {len(slower)} times grew by more than {tolerance:.0%}")
    return any(slower)


def _print_rows(out: Console, rows: Sequence[Mapping[str, object]]) -> None:
    """Print a table. If it is too wide and its transpose is not, print the transpose."""
    headings = _headings(dict.fromkeys(name for row in rows for name in row))
    cells = [{headings[name]: _cell(name, value) for name, value in row.items()} for row in rows]
    turned = _turned(cells)
    if table_width(cells) > out.width >= table_width(turned):
        print_table(out, turned, has_head=False)
    else:
        words = {headings[name] for row in rows for name in row if isinstance(row[name], str) and name != "fraction"}
        print_table(out, cells, right={*headings.values()} - words)


def _turned(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """A row for each column, which begins with its heading."""
    headings = dict.fromkeys(heading for row in rows for heading in row)
    return [{"": heading} | {str(number): row.get(heading, "") for number, row in enumerate(rows)} for heading in headings]


def _headings(names: Iterable[str]) -> dict[str, str]:
    """The heading of each name: short, unless another has the short one already. Rates share theirs."""
    headings: dict[str, str] = {}
    for name in names:
        short = _heading(name)
        headings[name] = name.replace("_", " ") if short in headings.values() and short != "rate" else short
    return headings


def _heading(name: str) -> str:
    if name in ("bytes_per_s", "flop_per_s"):  # each row has one of them, which its unit tells
        return "rate"
    return name.removesuffix("_per_s").removesuffix("_s").replace("_", " ")


def _cell(name: str, value: object) -> str:
    """A value with its unit, which the end of its name tells; other numbers are seconds."""
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    for end, text in _CELLS.items():
        if name.endswith(end):
            return text(value)
    return f"{value:,.3f} s" if value >= 1 else f"{value * 1e3:,.2f} ms" if value >= 1e-3 else f"{value * 1e6:,.1f} us"


_CELLS: Final[Mapping[str, Callable[[float], str]]] = {
    "fraction": "{:.1%}".format,
    "bytes_per_s": lambda value: f"{value / 1e9:,.1f} GB/s",
    "flop_per_s": lambda value: f"{value / 1e12:,.3g} TFLOP/s",
    "_per_s": "{:,.1f}/s".format,
    "_length": "{:.2f}".format,
    "times_plain": "{:.2f}".format,
}  # by the end of a name, the longer first
