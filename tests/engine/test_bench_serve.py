"""engine bench serve with the server that it starts: the model that ships with the plugins, on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from enginery.bench.serve_load import Load
from enginery.cli.bench_serve import _warm_up

COMMAND = [sys.executable, "-m", "enginery", "bench", "serve", "--device", "cpu"]
COMMAND += ["--input-len", "8:16", "--output-len", "4"]


def children(process: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def lives(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_server_is_started_measured_and_ended(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    flags = ["--requests", "6", "--concurrency", "2", "--rate", "20", "--num-pages", "64", "--output", str(file)]
    environ = os.environ | {"ENGINERY_NUM_PAGES": "1"}  # the flag comes first, in the server too
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=150, check=True, env=environ)
    assert "ttft p50" in done.stdout
    assert "ready: " in done.stderr
    report = json.loads(file.read_text())
    assert [row["what"]["load"] for row in report["rows"]] == ["20/s", "2 at once"]
    for row in report["rows"]:
        assert row["derived"]["errors"] == 0
        assert row["details"]["output_tokens"] == 6 * 4
        assert row["details"]["ready_s"] > 0
    assert report["settings"] == {"device": "cpu", "num_pages": 64}


def test_the_server_ends_with_a_bench_that_is_killed() -> None:
    with subprocess.Popen([*COMMAND, "--requests", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
        assert any(line.startswith("ready: ") for line in bench.stderr)
        (server,) = children(bench.pid)
        started = [server, *children(server)]
        assert len(started) >= 2
        bench.send_signal(signal.SIGKILL)
        end_s = time.monotonic() + 30
        while any(map(lives, started)):
            assert time.monotonic() < end_s, "the server outlives its bench"
            time.sleep(0.1)


def test_a_server_that_does_not_start_is_told_with_its_words() -> None:
    done = subprocess.run([*COMMAND, "--num-pages", "0"], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 1
    why, last = done.stderr.splitlines()[-2:]
    assert why == "engine: num_pages is 0, but must be at least 1"
    assert last == "engine: the server ended with exit status 2 while it started; above is why"


def test_warm_up_requests_are_of_the_load_and_may_be_none() -> None:
    closed = Load(lengths=((8, 4),) * 40, concurrency=16)
    assert [len(_warm_up(closed, wanted).lengths) for wanted in (None, 3, 100)] == [16, 3, 40]
    assert _warm_up(closed, 0) is None
    opened = Load(lengths=((8, 4),) * 40, rate=7.5)
    few = _warm_up(opened, None)
    assert (few.rate, few.concurrency, len(few.lengths)) == (None, 15, 15)
