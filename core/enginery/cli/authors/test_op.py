"""`engine test-op`: a plugin's operations against the core's references."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from enginery.cli.authors.report import OnlyFlag, ReportFlag, StopFlag, check_device, finish, watched
from enginery.plugin.registry import Registry


def check_ops(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The set of operations, as its OpSpec names it.")],
    *,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to run it.")] = "cpu",
    dtype: Annotated[list[str] | None, typer.Option(help="Only this dtype. Repeatable.")] = None,
    only: OnlyFlag = "",
    stop_first: StopFlag = False,
    as_json: ReportFlag = False,
) -> None:
    """Check that a plugin's operations give what the references give, over shapes and dtypes. Exits with 1 if they do not."""
    check_device(device)
    registry = Registry.load()
    from enginery.testing.kits.checks import run_checks
    from enginery.testing.kits.ops import DTYPES, op_checks

    checks = op_checks(name, registry, device=device, dtypes=dtype or DTYPES)
    with watched(as_json=as_json) as (console, on_row):
        report = run_checks(name, checks, only=only, stop_first=stop_first, on_row=on_row)
    finish(console, report, f"operations {name} on {device}", as_json=as_json)
