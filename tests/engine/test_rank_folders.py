"""The folder of an engine's ranks stays when all of its processes are killed; its server or a later engine removes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from quick_processes import run_python

from enginery.engine.ranks.wires import HostWires

KILLED = """
import os, signal, zmq
from enginery.engine.ranks.wires import HostWires
HostWires().bind(zmq.PULL, "reports")
os.kill(os.getpid(), signal.SIGKILL)
"""
LOADING = ("serve", "--port", "0", "--tp", "2", "--device", "cpu", "--num-threads", "1", "--num-pages", "64")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A TMPDIR of its own, whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def engine_that_was_killed(temporary: Path) -> Path:
    """The socket that is left of it."""
    before = set(temporary.iterdir())
    assert run_python("-c", KILLED, check=False).returncode < 0
    (left,) = set(temporary.iterdir()) - before
    return left / "reports"


def test_what_a_killed_engine_left_is_removed_by_the_next(temporary: Path) -> None:
    assert engine_that_was_killed(temporary).is_socket()
    HostWires().close()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_stopped_while_its_ranks_load_leaves_nothing(temporary: Path, number: int) -> None:
    """Its engine cannot be asked to end then, and is killed."""
    process = subprocess.Popen([sys.executable, "-m", "enginery", *LOADING], stderr=subprocess.PIPE, start_new_session=True)
    with process:
        while not any(temporary.glob("enginery-*/reports")):
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.02)
        os.killpg(process.pid, number)
    assert (process.returncode, list(temporary.glob("enginery-*"))) == (0, [])


def test_folders_of_engines_that_live_and_of_others_stay(temporary: Path) -> None:
    alive = HostWires()
    _, address = alive.bind(zmq.PULL, "reports")
    other = temporary / "enginery-mine" / "reports"
    other.parent.mkdir()
    other.write_text("a file that somebody wrote")
    HostWires().close()
    assert Path(address.removeprefix("ipc://")).is_socket()
    assert len(list(temporary.iterdir())) == 2
    alive.close()
    assert other.read_text()


FORKS = """
import gc, os, signal, sys
from enginery import LLM, SamplingParams
model, ways = LLM(tp=2, device="cpu", num_threads=1, num_pages=16), ["close", "collect", "exit"]
ask = lambda: model.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), progress=False)
for way in ways:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, way
        continue
    signal.alarm(20)
    if way == "close":
        model.close()
    if way == "collect":
        del model
        gc.collect()
    sys.exit()
assert len(ask()[0].token_ids) == 4
model.close()
"""


def test_a_process_that_was_forked_from_an_engine_of_ranks_ends_and_leaves_them(temporary: Path) -> None:
    """It closes or loses the model, or ends with it: not one waits for threads that the fork did not bring along."""
    run_python("-c", FORKS, check=True)
    assert not any(temporary.glob("enginery-*")), "and the engine removes its own"
