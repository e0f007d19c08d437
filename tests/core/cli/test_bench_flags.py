"""What becomes of a report: printed, written, compared; and how a comparison ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from enginery.bench.floor import DeviceLimits
from enginery.bench.report import Report, Row, make_report
from enginery.cli.flags.bench import show, with_report_flags
from enginery.cli.main import build_app
from enginery.config.schema import EngineOptions
from enginery.errors import ConfigError, EnginError


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a benchmark whose one time is its argument."""
    monkeypatch.setenv("COLUMNS", "200")

    @with_report_flags
    def offline(seconds: float, *, device: str = "a CPU") -> Report:
        limits = DeviceLimits(copy_bytes_per_s=2.5e9, read_bytes_per_s=3e9, product_flop_per_s=4.2e12, dtype="float32")
        row = Row(what={"workload": "W1"}, measured={"total_s": seconds}, derived={"out_tokens_per_s": 1234.5, "floor_s": None})
        return make_report("offline", device, [row], options=EngineOptions(), limits=[limits])

    app = typer.Typer()
    app.command()(offline)

    def run(*arguments: object) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if isinstance(result.exception, ConfigError):
            raise result.exception
        return result

    return run


def test_a_report_is_a_table_with_units(bench: Callable[..., Result]) -> None:
    shown = bench(0.0123).output
    for text in ("workload", "W1", "12.30 ms", "1,234.5/s", "-", "a CPU: copy bytes 2.5 GB/s", "product flop 4.2 TFLOP/s"):
        assert text in shown


def test_json_is_all_that_is_printed(bench: Callable[..., Result], tmp_path: Path) -> None:
    printed = bench(2, "--json", "--output", tmp_path / "out.json")
    assert json.loads(printed.stdout) == json.loads((tmp_path / "out.json").read_text())
    again = bench(9, "--json", "--compare", tmp_path / "out.json")
    assert json.loads(again.stdout)["rows"][0]["measured"] == {"total_s": 9.0}
    assert "slower" in again.stderr
    assert again.exit_code == 1


@pytest.mark.parametrize(
    ("now", "tolerance", "exit_code"),
    [(1.0, 0.05, 0), (1.04, 0.05, 0), (1.06, 0.05, 1), (1.06, 0.1, 0), (0.1, 0, 0), (1.001, 0, 1)],
)
def test_what_grew_beyond_the_tolerance_fails(
    bench: Callable[..., Result], tmp_path: Path, now: float, tolerance: float, exit_code: int
) -> None:
    before = tmp_path / "before.json"
    assert bench(1, "--output", before).exit_code == 0
    result = bench(now, "--compare", before, "--tolerance", tolerance)
    assert result.exit_code == exit_code
    assert ("slower" in result.output) == bool(exit_code)
    assert f"{1 / now:.3f}" in result.output


def test_a_time_of_nothing_is_compared_without_a_speed(bench: Callable[..., Result], tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    bench(1, "--output", before)
    result = bench(0, "--compare", before)
    assert result.exit_code == 0
    assert result.output.splitlines()[-2].split()[-1] == "-"


def test_a_report_that_cannot_be_compared_with_is_still_written(bench: Callable[..., Result], tmp_path: Path) -> None:
    bench(1, "--output", tmp_path / "before.json", "--device", "other")
    with pytest.raises(ConfigError, match="another device"):
        bench(2, "--compare", tmp_path / "before.json", "--output", tmp_path / "now.json")
    assert json.loads((tmp_path / "now.json").read_text())["device"] == "a CPU"
    with pytest.raises(ConfigError, match=r"none\.json"):
        bench(3, "--compare", tmp_path / "none.json", "--output", tmp_path / "never.json")
    assert not (tmp_path / "never.json").exists()


@pytest.mark.parametrize("place", ["none/out.json", "."])
def test_an_output_that_cannot_be_written_is_told_before_anything_is_measured(
    bench: Callable[..., Result], tmp_path: Path, place: str
) -> None:
    with pytest.raises(ConfigError, match=r"--output .* cannot be written"):
        bench(2, "--output", tmp_path / place)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("offline", "W2", "--model", "m"), "leave out the model m"),
        (("offline", "W99"), "no workload 'W99'"),
        (("latency", "a", "--model", "b"), "two models are named, a and b"),
        (("startup", "a", "--model", "b"), "two models are named, a and b"),
        (("kernels", "--device", "cpu", "--attention-backend", "none", "-p", "no:x"), "plugin 'x'"),
        (
            ("kernels", "--device", "cpu", "--dtype", "float64"),
            "--dtype is 'float64', but must be one of float32, bfloat16, float16",
        ),
        *[
            ((*command, "--device", device), f"device is '{device}', but must be auto, cpu, cuda or cuda:<index>")
            for command in (("kernels",), ("kernels", "--quick"), ("latency", "llama-125m"), ("offline", "C1"))
            for device in ("tpu", "cuda:x")
        ],
        (("kernels", "--device", "mps", "--quick"), "device is 'mps', but must be auto, cpu, cuda or cuda:<index>"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(build_app(), ["bench", *arguments])
    assert isinstance(result.exception, EnginError)
    assert words in str(result.exception)


def kernels_report() -> Report:
    """As engine bench kernels makes on a CPU: many rows, of which some never left the cache."""
    rows = [
        Row(
            what={"kernel": kernel, "shape": shape, "dtype": "bfloat16"},
            measured={"median_s": 0.000251},
            derived={unit: 5.1e9, "fraction": fraction},
            details={"limit": "read_bytes_per_s", "in_graph": False, "in_cache": fraction is None},
        )
        for kernel, shape, unit, fraction in [
            ("flashinfer-mla decode", "heads 32/8, 16 x 32768", "bytes_per_s", 0.61),
            ("torch prefill", "heads 16/8, 1 x 256", "flop_per_s", 0.12),
            *[("reference qk_norm_rotary_write", f"{count} tokens", "bytes_per_s", None) for count in range(17)],
        ]
    ]
    limits = DeviceLimits(copy_bytes_per_s=2.5e9, read_bytes_per_s=3e9, product_flop_per_s=4.2e12, dtype="bfloat16")
    return make_report("kernels", "a CPU", rows, options=EngineOptions(), limits=[limits])


@pytest.mark.parametrize("columns", ["60", "80"])
def test_many_rows_can_be_read_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    show(kernels_report())
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= int(columns)
    words = shown.split()
    for word in ("flashinfer-mla", "qk_norm_rotary_write", "32768", "251.0", "61.0%", "GB/s", "TFLOP/s"):
        assert word in words


def test_rows_are_lines_in_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show(kernels_report())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "dtype bfloat16"
    (line,) = (line for line in lines if line.startswith("flashinfer-mla decode"))
    assert line.split("  ")[-1].strip() == "61.0%"
    assert "\x1b" not in line


def test_what_stayed_in_a_cache_is_no_share_of_the_memory(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show(kernels_report())
    shown = capsys.readouterr().out
    assert shown.count("in cache") == 18
    assert "in cache: faster than memory" in shown
    assert "--full" in shown


def test_few_rows_with_many_times_are_shown_on_their_side(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row = Row(what={"load": "rate 4"}, measured={f"time_{number}_s": 0.5 for number in range(12)})
    show(make_report("serve", "a CPU", [row], options=EngineOptions()))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13
    assert lines[0].split() == ["load", "rate", "4"]


def test_a_count_and_its_rate_are_two_columns(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row = Row(what={"requests": 4}, measured={"total_s": 2.0}, derived={"requests_per_s": 2.0})
    show(make_report("serve", "a CPU", [row], options=EngineOptions()))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["requests", "total", "requests", "per", "s"]
    assert lines[1].split() == ["4", "2.000", "s", "2.0/s"]
