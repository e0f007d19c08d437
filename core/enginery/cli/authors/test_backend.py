"""`engine test-backend`: the conformance kit on an installed attention backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import typer

from enginery.cli.authors.report import OnlyFlag, ReportFlag, StopFlag, check_device, finish, watched
from enginery.cli.flags.plugins import BlockFlags, NoPluginsFlag, blocked_names
from enginery.plugin.registry import Registry


def check_backend(
    name: Annotated[str, typer.Argument(metavar="BACKEND", help="The backend, as engine list-backends names it.")],
    *,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to run it.")] = "cpu",
    only: OnlyFlag = "",
    stop_first: StopFlag = False,
    as_json: ReportFlag = False,
    options: Annotated[
        list[str] | None, typer.Option("--option", "-o", metavar="NAME.KEY=VALUE", help="An option of the backend. Repeatable.")
    ] = None,
    block: BlockFlags = None,
    no_plugins: NoPluginsFlag = False,
) -> None:
    """Check that a backend keeps its contract, with everything that it claims. Exits with 1 if it does not."""
    check_device(device)
    registry = Registry.load(blocked=blocked_names(block or ()), no_plugins=no_plugins, options=options or ())
    from enginery.testing.conformance import run_conformance
    from enginery.testing.report import has_words
    from enginery.testing.subject import Subject

    subject = Subject.installed(name, registry, device=device)
    with watched(as_json=as_json) as (console, on_row):
        report = run_conformance(subject, only=only, stop_first=stop_first, on_row=on_row)
    found = any(has_words(f"{row.rule}: {row.case}", only) for row in report.rows)  # the hooks are checked whatever the words
    if not found and not report.count("failed"):
        report = replace(report, rows=[])
    finish(console, report, f"{report.backend} on {report.device}", as_json=as_json)
