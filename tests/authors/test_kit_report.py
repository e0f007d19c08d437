"""How a kit's report ends in a pipe, and what of the command line is told before."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import typer
from rich.console import Console

from enginery.cli.authors.report import finish
from enginery.cli.authors.test_backend import check_backend
from enginery.cli.authors.test_op import check_ops
from enginery.errors import Unsupported


@dataclass(frozen=True)
class Row:
    rule: str = "builds"
    case: str = ""
    outcome: str = "passed"
    message: str = ""
    fault: str = ""
    seconds: float = 0.0


class Report:
    def __init__(self, *rows: Row) -> None:
        self.rows = rows

    def count(self, outcome: str) -> int:
        return sum(row.outcome == outcome for row in self.rows)

    def advice(self) -> list[str]:
        return []

    def as_data(self) -> dict[str, object]:
        return {}


def test_the_last_line_is_one_whatever_the_folder_is_called(capsys) -> None:
    name = f"/models/[bold]{'x' * 100} on cpu"
    finish(Console(highlight=False), Report(Row()), name, as_json=False)
    assert capsys.readouterr().out.endswith(f"\n{name}: 1 passed, 0 failed, 0 skipped\n")


def test_of_failures_of_one_kind_the_first_are_shown_and_the_others_counted(capsys) -> None:
    crashes = [Row(outcome="failed", fault="crash", message=f"case {number}") for number in range(5)]
    with pytest.raises(typer.Exit):
        finish(
            Console(highlight=False), Report(*crashes, Row(outcome="failed", fault="NaN", message="case 9")), "it", as_json=False
        )
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert shown[:3] == ["[crash] case 0", "[crash] case 1", "[crash] case 2"]
    assert shown[3:] == ["[crash] builds: and 2 more, which --json has", "[NaN] case 9"]


def test_what_is_said_of_several_rules_is_said_once(capsys) -> None:
    rows = [Row(rule=rule, outcome="skipped", message="the rule hooks is broken") for rule in ("claims", "numbers", "numbers")]
    finish(Console(highlight=False), Report(*rows), "it", as_json=False)
    assert capsys.readouterr().out.count("is broken") == 1
    finish(Console(highlight=False), Report(*rows), "it", as_json=False)
    assert "\nclaims, numbers skipped: the rule hooks is broken\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", [check_backend, check_ops])
def test_a_device_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, command) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(Unsupported, match="sees no CUDA device here; leave --device out"):
        command({check_backend: "torch", check_ops: "cpu"}[command], device="cuda")


def test_words_that_no_check_of_a_backend_has_end_with_1(capsys) -> None:
    with pytest.raises(typer.Exit):
        check_backend("torch", only="nmbers")
    assert capsys.readouterr().out.endswith("torch on cpu: no check has these words\n")
