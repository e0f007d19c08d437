"""Reports: what is in them, what is measured, and which may be compared."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_facts import engine_facts

from enginery.bench import device_limits, startup
from enginery.bench.device_limits import measure_limits
from enginery.bench.latency import measure_latencies, token_times
from enginery.bench.report import Row, compare, make_report, percentile, read_report
from enginery.bench.workloads import equal_requests
from enginery.config.schema import EngineOptions
from enginery.contracts.request import GenerationRequest, RequestOutput
from enginery.errors import ConfigError, EnginError

FACTS = engine_facts(model_name="slow", folder="nowhere", vocab_size=50, dtype="float32", num_pages=1, phases_s={"weights": 1.5})


class SlowEngine:
    """Every step takes 20 ms and yields a token of each request, behind the first `guesses` more. sleep: by which clock."""

    facts = FACTS

    def __init__(self, sleep: Callable[[float], None] = time.sleep, *, guesses: int = 0) -> None:
        self.sleep = sleep
        self.guesses = guesses
        self.left: dict[str, int] = {}
        self.begun: set[str] = set()
        self.batches: list[int] = []

    @property
    def has_work(self) -> bool:
        return any(self.left.values())

    def submit(self, request: GenerationRequest) -> None:
        self.left[request.request_id] = request.params.max_tokens

    def step(self) -> list[RequestOutput]:
        self.sleep(0.02)
        running = [name for name, count in self.left.items() if count]
        self.batches.append(len(running))
        came = {name: min(self.left[name], 1 + self.guesses * (name in self.begun)) for name in running}
        for name, count in came.items():
            self.left[name] -= count
            self.begun.add(name)
        return [RequestOutput(request_id=name, token_ids=(1,) * count) for name, count in came.items()]


def report(**seconds: float) -> dict:
    rows = [Row(what={"workload": name, "dtype": "float32"}, measured={"total_s": value}) for name, value in seconds.items()]
    return dict(make_report("offline", "a CPU", rows, options=EngineOptions(num_pages=5)))


def test_a_report_says_how_to_repeat_it() -> None:
    made = report(W1=1.0)
    assert made["settings"] == {"num_pages": 5}
    assert {"command", "commit", "device", "versions", "limits"} <= made.keys()
    assert torch.__version__.startswith(made["versions"]["torch"])
    plugins = {point.dist.name for point in importlib.metadata.entry_points(group="enginery")}
    assert {"enginery", "python", *plugins} <= made["versions"].keys()
    assert json.loads(json.dumps(made)) == made


def test_times_are_compared_by_what_they_are_of() -> None:
    (change,) = compare(report(W1=2.0, W2=9.0), report(W2=6.0))
    assert change == {"what": "workload W2, dtype float32", "name": "total_s", "before": 9.0, "after": 6.0}


def test_another_device_is_refused() -> None:
    before = report(W1=1.0) | {"device": "another CPU"}
    with pytest.raises(ConfigError, match="another device, another CPU; this is a CPU"):
        compare(before, report(W1=1.0))


def test_what_was_not_measured_before_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no\n  workload W2, dtype float32\nbut only\n  workload W1, dtype float32"):
        compare(report(W1=1.0), report(W2=1.0))
    before = copy.deepcopy(report(W1=1.0))
    before["rows"][0]["measured"] = {"other_s": 1.0}
    with pytest.raises(ConfigError, match="has no"):
        compare(before, report(W1=1.0))


@pytest.mark.parametrize("text", ["{", "[]", '{"bench": "latency"}', None])
def test_a_file_that_is_no_such_report_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "before.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"before\.json"):
        read_report(path, bench="offline")
    path.write_text(json.dumps(report(W1=1.0)))
    assert read_report(path, bench="offline")["rows"][0]["measured"] == {"total_s": 1.0}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rows": None}, r"Expected `array`, got `null` - at `\$\.rows`"),
        ({"rows": [{"what": {}}]}, r"missing required field `\w+` - at `\$\.rows\[0\]`"),
        ({"rows": [{"what": {}, "measured": {"total_s": "1"}, "derived": {}, "details": {}}]}, "Expected `float`, got `str`"),
        ({"device": 3}, r"Expected `str`, got `int` - at `\$\.device`"),
    ],
)
def test_a_report_of_another_shape_is_refused(tmp_path: Path, fields: dict, words: str) -> None:
    path = tmp_path / "before.json"
    path.write_text(json.dumps(report(W1=1.0) | fields))
    with pytest.raises(ConfigError, match=rf"before\.json cannot be compared with: .*{words}"):
        read_report(path, bench="offline")
    path.write_text('{"bench": "offline"}')
    with pytest.raises(ConfigError, match="missing required field"):
        read_report(path, bench="offline")


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (50, 90, 99)] == [50.0, 90.0, 99.0]
    assert percentile([3.0], 50) == 3.0


class Clock:
    """Stands still but for who sleeps by it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def perf_counter(self) -> float:
        return self.now_s


def test_latencies_are_taken_when_a_token_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("enginery.bench.latency.time", clock)
    engine = SlowEngine(clock.sleep)
    measured = measure_latencies(engine, equal_requests(2, input_len=3, output_len=3), repeats=2)
    assert measured["first_token_p50_s"] == pytest.approx(0.02)
    assert measured["per_token_p50_s"] == pytest.approx(0.02)
    assert measured["total_s"] == pytest.approx(0.06)
    assert set(engine.batches) == {2}
    assert len(engine.batches) == 3 * 3


def test_tokens_that_come_at_once_share_the_time_of_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("enginery.bench.latency.time", clock)
    engine = SlowEngine(clock.sleep, guesses=3)
    measured = measure_latencies(engine, equal_requests(2, input_len=3, output_len=9), repeats=2)
    assert measured["total_s"] == pytest.approx(0.06), "a step with the first token, and two with four each"
    assert [measured[f"per_token_p{each}_s"] for each in (50, 90, 99)] == pytest.approx([0.02 / 4] * 3)


def test_a_request_whose_tokens_all_come_in_one_step_has_no_time_per_token() -> None:
    assert list(token_times([5.0, 5.0, 5.0])) == list(token_times([5.0])) == []
    assert list(token_times([1.0, 2.0, 4.0, 4.0])) == [1.0, 1.0, 1.0]


def test_a_start_is_timed_part_by_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Late:
        @staticmethod
        def build(asked: EngineOptions, registry: object) -> SlowEngine:
            assert asked.blocked_plugins == ("x",)
            time.sleep(0.03)
            return SlowEngine()

    monkeypatch.setattr("enginery.engine.engine.Engine", Late)
    monkeypatch.setattr("enginery.config.sources.registry_for", lambda asked: None)
    options = json.dumps(vars(EngineOptions(blocked_plugins=("x",))))
    startup.main(str(time.monotonic() - 5), options, "4")
    printed = json.loads(capsys.readouterr().out)
    measured, phases = printed["measured"], printed["phases_s"]
    assert phases["imports"] >= 5
    assert phases["weights"] == 1.5
    assert measured["ready_s"] >= 5.03
    assert measured["first_token_after_ready_s"] == phases["prompt"] >= 0.02
    assert measured["first_token_s"] == pytest.approx(measured["ready_s"] + phases["prompt"])
    assert phases["second token"] >= 0.02


def test_a_process_that_does_not_start_says_why(tmp_path: Path) -> None:
    options = EngineOptions(model=str(tmp_path), no_plugins=True)
    with pytest.raises(EnginError, match=r"exit status 1:(?s:.*)config\.json"):
        startup.start_once(options, input_len=1)


def test_limits_of_the_device_are_rates_that_it_reached() -> None:
    limits = measure_limits(torch.device("cpu"), "float32")
    assert limits.dtype == "float32"
    for rate in (limits.copy_bytes_per_s, limits.read_bytes_per_s, limits.product_flop_per_s):
        assert 1e8 < rate < 1e14


def test_a_cpu_that_is_slow_in_a_narrow_dtype_does_at_best_what_it_does_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that widen their rows did 3.5 times what such a CPU was said to do at best."""
    monkeypatch.setattr(device_limits, "_SIZES", {"cpu": (1 << 10, 64, 0.0)})
    monkeypatch.setattr(device_limits.F, "linear", lambda a, _: time.sleep(0.05 if a.dtype == torch.bfloat16 else 0.001))
    assert measure_limits(torch.device("cpu"), "bfloat16").product_flop_per_s > 2 * 64**3 / 0.025
