"""engine test-op on operations that are installed."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from offers import op_spec
from typer.testing import CliRunner

from enginery.api import RecordCalls, only_torch
from enginery.cli.main import build_app
from enginery.errors import ConfigError, PluginError
from enginery.testing.kits.checks import run_checks
from enginery.testing.kits.ops import OpSuite, op_checks_of_spec


def test_the_command_prints_the_report_and_its_exit_status_follows() -> None:
    done = CliRunner().invoke(build_app(), ["test-op", "cpu", "-k", "rms_norm", "--dtype", "float32", "--json"])
    assert done.exit_code == 0, done.output
    assert {row["outcome"] for row in json.loads(done.stdout)["rows"]} == {"passed"}
    assert CliRunner().invoke(build_app(), ["test-op", "cpu", "-k", "no such words"]).exit_code == 1
    strange = CliRunner().invoke(build_app(), ["test-op", "cpu", "--dtype", "int8"])
    assert isinstance(strange.exception, ConfigError)
    assert str(strange.exception) == "the dtype is int8, but must be one of float32, bfloat16, float16"
    unknown = CliRunner().invoke(build_app(), ["test-op", "cpuu"])
    assert isinstance(unknown.exception, PluginError)
    assert "did you mean cpu" in str(unknown.exception)


def outcomes(gated_silu: Callable[[torch.Tensor], torch.Tensor], record_calls: RecordCalls | None = None) -> set[str]:
    """What the kit says of a set with this operation alone, and '' where it keeps to its promises."""
    spec = op_spec({"gated_silu": gated_silu}, record_calls=record_calls)
    report = run_checks("made", op_checks_of_spec(spec, dtypes=("float32",)), only="size 768")
    return {row.message.partition(" in ")[0].rpartition(": ")[2] for row in report.rows}


def test_an_operation_that_reads_numbers_back_keeps_no_promise_to_be_recorded() -> None:
    def reading(x: torch.Tensor) -> torch.Tensor:
        assert not x.numel() or x.max().item() < 1e9
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    assert outcomes(reading) == {""}
    assert outcomes(reading, only_torch) == {"Tensor.item is called"}


def test_an_operation_that_takes_rows_for_adjacent_is_wrong() -> None:
    def of_adjacent_rows(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.as_strided(x.shape, (x.shape[-1], 1)).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    (said,) = outcomes(of_adjacent_rows)
    assert "is off by" in said


class TestCpuOps(OpSuite):
    ops = "cpu"
