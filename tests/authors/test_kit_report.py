"""How a kit's report ends in a pipe."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from enginery.cli.authors.report import finish


@dataclass(frozen=True)
class Row:
    rule: str = "builds"
    case: str = ""
    outcome: str = "passed"
    message: str = ""
    fault: str = ""
    seconds: float = 0.0


class Report:
    rows = (Row(),)

    def count(self, outcome: str) -> int:
        return sum(row.outcome == outcome for row in self.rows)

    def advice(self) -> list[str]:
        return []

    def as_data(self) -> dict[str, object]:
        return {}


def test_the_last_line_is_one_whatever_the_folder_is_called(capsys) -> None:
    name = f"/models/[bold]{'x' * 100} on cpu"
    finish(Console(highlight=False), Report(), name, as_json=False)
    assert capsys.readouterr().out.endswith(f"\n{name}: 1 passed, 0 failed, 0 skipped\n")
