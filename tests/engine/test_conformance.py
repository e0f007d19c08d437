"""The kit on what is installed: every backend keeps the contract, and the command says so."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pairwise import EVERYTHING

from enginery.cli.main import main
from enginery.testing import conformance
from enginery.testing.conformance import RULES, Check, checks_of
from enginery.testing.subject import Subject


def first_of_each_rule(subject: Subject, **given: Any) -> list[Check]:
    return list({check.rule: check for check in reversed(checks_of(subject, **given))}.values())[::-1]


@pytest.mark.parametrize("name", ["torch", "linear"] if EVERYTHING else ["linear"])
def test_an_installed_backend_keeps_everything_that_it_claims(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU each rule is run once: the plugins' own tests run all of its cases."""
    if not EVERYTHING:
        monkeypatch.setattr(conformance, "checks_of", first_of_each_rule)
    with pytest.raises(SystemExit) as end:
        main(["test-backend", name, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["backend"], report["device"]) == (name, "cpu")
    assert [row["message"] for row in report["rows"] if row["outcome"] == "failed"] == []
    assert {row["rule"] for row in report["rows"]} == {rule.name for rule in RULES}
    assert all(row["message"] for row in report["rows"] if row["outcome"] == "skipped")
    assert not end.value.code


def test_what_is_no_attention_fails_with_the_rule_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["test-backend", "echo"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "claims: What capabilities claim is not refused. Seen: it refuses everything that it claims" in shown
    assert "echo on cpu: 0 passed, 1 failed" in shown
    assert end.value.code == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["torhc"], "there is no attention backend 'torhc'; did you mean torch?"),
        (["torch", "-p", "no:attn-torch"], "is blocked"),
        (["torch", "-o", "torch.speed=9"], "-o torch.speed=9"),
    ],
)
def test_a_name_that_is_not_there_is_an_error_with_the_near_ones(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["test-backend", *arguments])
    assert said in capsys.readouterr().err
    assert end.value.code == 2


def test_a_device_that_is_not_claimed_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["test-backend", "torch", "--device", "abacus"])
    assert "abacus" in capsys.readouterr().err
    assert end.value.code == 2
