"""What becomes of a benchmark's report: a table, JSON, a file, and a comparison with an earlier one."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from enginery.bench.report import Report, compare, read_report
from enginery.errors import ConfigError

_FLAGS: Final = {
    "as_json": (Annotated[bool, typer.Option("--json", help="Print the report as JSON.")], False),
    "output": (Annotated[Path | None, typer.Option(help="Write the report as JSON to this file too.")], None),
    "compare": (Annotated[Path | None, typer.Option(help="An --output from before; exits with 1 if something got slower.")], None),
    "tolerance": (Annotated[float, typer.Option(min=0, help="With --compare: the share by which times may grow.")], 0.05),
}


def with_report_flags(command: Callable[..., Report]) -> Callable[..., None]:
    """Give a command that returns a report the flags for what becomes of it."""

    @functools.wraps(command)
    def run(*first: Any, **given: Any) -> None:
        as_json, output, earlier, tolerance = (given.pop(name) for name in _FLAGS)
        before = None if earlier is None else read_report(earlier, bench=command.__name__)
        if output is not None and (output.is_dir() or not os.access(output if output.exists() else output.parent, os.W_OK)):
            raise ConfigError(f"--output {output} cannot be written; name a file in a folder that is there and is yours to write")
        report = command(*first, **given)
        data = json.dumps(report, indent=1)
        if output is not None:
            output.write_text(data + "\n")
        if as_json:
            typer.echo(data)
        else:
            show(report)
        if before is not None and show_changes(compare(before, report), tolerance, on_stderr=as_json):
            raise typer.Exit(1)

    own = inspect.signature(command, eval_str=True).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    flags = [inspect.Parameter(name, keyword, default=default, annotation=kind) for name, (kind, default) in _FLAGS.items()]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *flags)}
    run.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]  # typer reads the flags from it
    return run


def show(report: Report) -> None:
    """A row per measurement, or a column where rows are too wide; then failures, the phases of a start, and the device's limits."""
    console = Console(highlight=False)
    rows = [{**row["what"], **row["measured"], **row["derived"]} for row in report["rows"]]
    if sum(max(len(_heading(name)), len(_cell(name, value))) + 3 for name, value in rows[0].items()) < console.width:
        _print_table(console, rows)
    else:
        _print_columns(console, rows)
    for row in report["rows"]:
        for error, count in row["details"].get("errors", {}).items():
            console.print(f"{count} times: {error}", markup=False)
        if phases := row["details"].get("phases_s"):
            _print_table(console, [{"phase": name, "median_s": seconds} for name, seconds in phases.items()])
    for limits in report["limits"]:
        known = ", ".join(f"{_heading(name)} {_cell(name, value)}" for name, value in limits.items())
        console.print(f"{report['device']}: {known}", markup=False)


def show_changes(changes: Sequence[Mapping[str, Any]], tolerance: float, *, on_stderr: bool) -> bool:
    """Print them; says whether a time grew by more than this share."""
    slower = [change["after"] > change["before"] * (1 + tolerance) for change in changes]
    rows = [
        {**change, "speed": f"{change['before'] / change['after']:.3f}", "": "slower" if flag else ""}
        for change, flag in zip(changes, slower, strict=True)
    ]
    console = Console(stderr=on_stderr, highlight=False)
    _print_table(console, rows)
    console.print(f"{sum(slower)} of {len(slower)} times grew by more than {tolerance:.0%}")
    return any(slower)


def _print_table(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table()
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(_heading(name), justify="left" if isinstance(rows[0].get(name), str) else "right", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(name, row[name]) if name in row else "" for name in names))
    console.print(table)


def _print_columns(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(show_header=False)
    for name in dict.fromkeys(name for row in rows for name in row):
        table.add_row(_heading(name), *(_cell(name, row[name]) if name in row else "" for row in rows))
    console.print(table)


def _heading(name: str) -> str:
    return name.removesuffix("_per_s").removesuffix("_s").replace("_", " ")


def _cell(name: str, value: Any) -> str:
    """A value in the unit that its name ends in; a number that says nothing else is seconds."""
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    if name.endswith("fraction"):
        return f"{value:.1%}"
    if name.endswith("bytes_per_s"):
        return f"{value / 1e9:,.1f} GB/s"
    if name.endswith("flop_per_s"):
        return f"{value / 1e12:,.3g} TFLOP/s"
    if name.endswith("_per_s"):
        return f"{value:,.1f}/s"
    return f"{value:,.3f} s" if value >= 1 else f"{value * 1e3:,.2f} ms" if value >= 1e-3 else f"{value * 1e6:,.1f} us"
