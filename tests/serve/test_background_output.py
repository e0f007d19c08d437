"""A log that nobody reads."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading

import httpx
import pytest
from running import PATIENCE_S, started

from enginery.serve.background_output import BackgroundWriter
from enginery.serve.http.listening import bind
from enginery.serve.server import ServeSettings, _http

LONG = "/" + "x" * 190
ENOUGH = 500  # lines of it to fill a pipe more than once


@pytest.mark.parametrize("is_read", [True, False])
def test_a_log_that_nobody_reads_stops_neither_answers_nor_the_end(folder, is_read):
    with started(folder) as (process, url), httpx.Client(base_url=url, timeout=30) as client:
        for _ in range(ENOUGH):
            assert client.get(LONG).status_code == 404
        assert client.get("/health/live").status_code == 200
        process.terminate()
        if is_read:
            assert process.communicate(timeout=PATIENCE_S)[1].count(LONG) == ENOUGH
        assert process.wait(PATIENCE_S) == 0


def test_what_is_printed_while_nobody_reads_holds_nobody_up():
    code = (
        "import sys\n"
        "from enginery.serve.background_output import in_background\n"
        "with in_background(str):\n"
        "    for number in range(100_000): print('out', number); print('err', number, file=sys.stderr)\n"
        "sys.exit('the end')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.wait(PATIENCE_S) == 1
        out, err = process.communicate(timeout=PATIENCE_S)
    assert out.startswith("out 0\nout 1\n")
    assert err.startswith("err 0\nerr 1\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "2>/dev/full >/dev/full"])
def test_an_output_that_is_closed_or_full_hurts_nobody(closed):
    code = (
        "import sys\n"
        "from enginery.serve.background_output import in_background\n"
        "with in_background(str): print('x'); print('x', file=sys.stderr)\n"
    )
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code]
    assert subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False).returncode == 0


def test_a_full_disk_does_not_keep_a_server_from_starting(tmp_path):
    """It comes as far as a model that is not there."""
    command = [sys.executable, "-m", "enginery", "serve", "--no-plugins", "--port", "0", str(tmp_path / "none")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, "is no folder" in done.stderr) == (2, True), done.stderr


def test_a_stdout_that_was_closed_before_the_start_breaks_no_log(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with contextlib.closing(bind("127.0.0.1", 0, num_connections=8, refusal=b"")) as listener:
        _http(lambda scope, receive, send: None, ServeSettings(), listener)


def test_what_does_not_fit_is_counted_and_said_where_it_is_missing():
    reading, writing = os.pipe()
    writer = BackgroundWriter(writing, lambda count: f"{count} are missing\n", max_bytes=2_000)
    with io.TextIOWrapper(writer, encoding="utf-8", line_buffering=True) as text, open(reading) as pipe:
        filler = "f" * 999
        for _ in range(200):  # more than a pipe takes
            print(filler, file=text)
        dropped = writer._num_dropped
        assert dropped > 100
        lines = iter(pipe.readline, "")
        kept = [next(lines) for _ in range(200 - dropped)]
        assert set(kept) == {f"{filler}\n"}
        assert next(lines) == f"{dropped} are missing\n"
        print("after", file=text)
        assert next(lines) == "after\n"
        finishing = threading.Thread(target=writer.finish)
        finishing.start()
        finishing.join(PATIENCE_S)
        assert not finishing.is_alive()
        os.close(writing)


@pytest.mark.parametrize("style", ["text", "json"])
def test_the_line_about_missing_ones_is_in_the_log_s_style(style):
    from enginery.serve.http.logs import dropped

    line = dropped(style)(7)
    assert line.endswith("\n")
    assert "dropped" in (json.loads(line)["message"] if style == "json" else line)
    assert "7" in line
