"""`engine plugins`: what is installed, whether it can be used, and why not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from typing import Final

from rich.console import Console
from rich.table import Table

from enginery.cli.plugin_flags import BlockFlags, JsonFlag, NoPluginsFlag, load_registry
from enginery.plugin.records import PluginRecord, Status

COLOURS: Final = {
    Status.LOADED: "green",
    Status.AVAILABLE: "cyan",
    Status.BLOCKED: "yellow",
    Status.NO_DEVICE: "yellow",
    Status.INCOMPATIBLE: "red",
    Status.CONFLICT: "red",
    Status.BROKEN: "red",
}


def plugins(*, as_json: JsonFlag = False, block: BlockFlags = None, no_plugins: NoPluginsFlag = False) -> None:
    """Show the installed plugins, what they offer, and why one is not used."""
    records = load_registry(block, no_plugins=no_plugins).records
    if as_json:
        print(json.dumps([asdict(record) for record in records], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("plugin", "distribution", "version", "status", "offers"):
        table.add_column(column, overflow="fold", no_wrap=column == "plugin")
    for record in records:
        status = f"[{COLOURS[record.status]}]{record.status}[/]"
        table.add_row(record.name, record.distribution, record.version, status, "\n".join(record.offers))
    console = wide_console()
    console.print(table)
    print_reasons(console, records)


def wide_console() -> Console:
    """As wide as the terminal, or COLUMNS; else 200 columns, so that what reads a pipe finds names in one piece."""
    console = Console(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=200)


def print_reasons(console: Console, records: Iterable[PluginRecord]) -> None:
    """One paragraph for each record that has a reason."""
    for record in records:
        if record.reason:
            text = f"{record} is {record.status}: {record.reason}"
            console.print(f"\n{text}", markup=False, soft_wrap=True, style=COLOURS[record.status])
