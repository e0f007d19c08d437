"""What `engine serve` shows until it serves, and then: on a terminal, and to a pipe."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import psutil
import pytest
from engine_facts import engine_facts
from running import PATIENCE_S, SERVER, get, serving_lines, wait_until

from enginery import __version__
from enginery.contracts.engine import BuildProgress
from enginery.engine.build import StartPhase
from enginery.serve import start_display
from enginery.serve.start_display import Served, StartDisplay, chosen_line, summary


@contextlib.contextmanager
def loading(folder: Path, stdout: int) -> Iterator[subprocess.Popen[str]]:
    """A server whose engine never gets ready."""
    environ = {**os.environ, "FAKE_LOAD_S": "600", "TERM": "xterm-256color", "COLUMNS": "100"}
    command = [sys.executable, SERVER, str(folder), "0"]
    with subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_pipe_gets_a_line_at_once_and_one_every_few_seconds(folder: Path) -> None:
    with loading(folder, subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starting: loading the plugins\n"
        said = ""
        while "GB" not in said:
            said = process.stdout.readline()
            assert re.match(r"starting, \d+ s: ", said), said
        assert said.endswith(": reading weights, 3.0 of 16.0 GB\n")


def test_a_terminal_gets_one_line_that_changes_and_is_gone_when_the_start_ends(folder: Path) -> None:
    parent, child = pty.openpty()
    with loading(folder, child) as process:
        os.close(child)
        shown = io.BytesIO()

        def read() -> None:
            with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
                while chunk := os.read(parent, 4096):
                    shown.write(chunk)

        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: b"reading weights, 3.0 of 16.0 GB" in shown.getvalue())
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        reader.join(PATIENCE_S)
    os.close(parent)
    text = shown.getvalue().decode()
    assert "starting, " not in text, "plain lines are for pipes"
    assert text.rstrip().endswith("\x1b[2K"), "the line is erased"
    assert "\x1b[?25h" in text, "the cursor is back"


def test_progress_of_the_start_is_told_over_http(folder: Path) -> None:
    with loading(folder, subprocess.DEVNULL) as process:
        listening = psutil.Process(process.pid).net_connections
        wait_until(lambda: listening("tcp"))
        url = f"http://127.0.0.1:{listening('tcp')[0].laddr.port}"
        wait_until(lambda: get(f"{url}/health/progress").json().get("phase") == "weights")
        response = get(f"{url}/health/progress")
        told = {"status": "loading", "phase": "weights", "done_bytes": 3 * 10**9, "total_bytes": 16 * 10**9}
        assert (response.status_code, response.json()) == (200, told)


def test_a_start_that_fails_leaves_the_last_word_to_its_cause(folder: Path) -> None:
    command = [sys.executable, SERVER, str(folder), "0", "broken"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.stderr == "engine: the weights are gone; fetch them again\n"
    assert all(line.startswith("starting") for line in done.stdout.splitlines())


@pytest.mark.usefixtures("own_processes")
def test_a_real_start_is_told_in_a_few_lines(tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with serving_lines(log) as (url, said):
        assert said[0] == "starting: loading the plugins"
        summed = [line for line in said if not line.startswith("starting")]
        assert summed[0].startswith(f"ready: enginery-tiny at {url}, up to 2,048 tokens of context")
        assert re.fullmatch(
            r"  on cpu \(.+\), \w+; attention by (cpu|torch); KV cache of 4,096 tokens; started in \d+\.\d s", summed[1]
        )
        assert re.fullmatch(r"  chosen: family llama; (ops [\w +-]+; )?schedule policy fcfs; .*routes web", summed[2])
        assert summed[3:] == [f"  page: {url}/", next(line for line in summed if line.startswith(f"  curl {url}/v1/"))]
        info = get(f"{url}/server_info").json()["engine"]
    told = {each["setting"]: (each["value"], each["reason"]) for each in info["decisions"]}
    assert told["schedule policy"] == ("fcfs", f"auto: first come, first served, from plugin core (enginery=={__version__})")
    assert told["routes"][0] == "web"
    assert told["routes"][1].startswith("installed for its routes alone, from plugin web (enginery-web==")
    assert told["tool parser"][0]
    assert any(
        line.startswith("ops: triton (priority 20): runs on a CPU only in Triton's interpreter") for line in info["considered"]
    )
    assert any(re.match(r"softmax: triton \(priority \d+\): .*cuda", line) for line in info["considered"])
    assert any(re.fullmatch(r"softmax: (cpu|torch) \(priority \d+\): chosen", line) for line in info["considered"])
    assert [line for line in log.read_text().splitlines() if "/server_info" not in line] == [], "reasons go to debug logs"


def test_reasons_are_in_the_debug_log(tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with serving_lines(log, "--log-level", "debug", "--log-format", "json"):
        pass
    messages = [json.loads(line)["message"] for line in log.read_text().splitlines()]
    assert any(re.match(r"attention backend, softmax: (cpu|torch) .*chosen", message) for message in messages)
    assert any(message.startswith("dtype ") for message in messages)
    assert any(message.startswith("memory plan: ") for message in messages)


def test_every_phase_that_has_words_exists() -> None:
    phases = {*get_args(StartPhase), "process", "imports", "ranks"}
    assert set(start_display._TEXTS) <= phases


def test_after_the_end_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with StartDisplay(every_s=0.01) as display:
        display.show_progress(BuildProgress(phase="graphs"))
        wait_until(lambda: "capturing graphs" in capsys.readouterr().out)
        display.close()
        capsys.readouterr()
        display.show_progress(BuildProgress(phase="weights", done_bytes=1, total_bytes=2))
        with display.aside("fetching"):
            pass
    assert capsys.readouterr().out == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "start-display"]


def test_the_summary_says_what_must_be_said_about_a_checkpoint() -> None:
    facts = engine_facts(
        max_model_len=4096,
        attn_backend="flashinfer+triton",
        note="random weights",
        num_pages=1000,
        decisions=(("device", "cuda", "NVIDIA H200"),),
    )
    lines = summary(facts, Served(url="http://h:1"), seconds=2.54).splitlines()
    assert lines[:2] == [
        "ready: m at http://h:1, up to 4,096 tokens of context (random weights)",
        "  on cuda (NVIDIA H200), bfloat16; attention by flashinfer+triton; KV cache of 16,000 tokens; started in 2.5 s",
    ]
    assert len(lines) == 3
    several = summary(facts, Served(url="http://h:1", num_engines=2, num_ranks=4), seconds=2.54).splitlines()
    assert several[1].startswith("  2 engines of 4 ranks, each on cuda (NVIDIA H200), bfloat16; ")
    assert "KV cache of 16,000 tokens in each engine; " in several[1]


@pytest.mark.parametrize("chats", [True, False])
@pytest.mark.parametrize("has_key", [True, False])
def test_the_request_that_is_shown_is_one_that_is_answered(chats: bool, has_key: bool) -> None:
    """A base model has no chat template, and a server with keys answers nobody without."""
    served = Served(url="http://h:1", chats=chats, has_key=has_key)
    given = shlex.split(served.example('it\'s "m"'))
    assert given[1] == f"http://h:1/v1/{'chat/' * chats}completions"
    assert json.loads(given[-1])["model"] == 'it\'s "m"'
    assert ("messages" in json.loads(given[-1])) == chats
    assert ("Authorization: Bearer $ENGINERY_API_KEY" in given) == has_key


def test_what_won_is_told_with_the_drafter_and_without_what_is_off() -> None:
    decisions = [("family", "llama", ""), ("drafter", "eagle", "auto"), ("tool parser", "none", ""), ("dtype", "float32", "")]
    assert chosen_line(decisions) == "family llama; drafter eagle"
    assert chosen_line([("drafter", "off", "auto: none suits")]) == ""
