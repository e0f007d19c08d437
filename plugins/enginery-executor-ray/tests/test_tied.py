"""A module that runs tied to the process that started it."""

from __future__ import annotations

import subprocess
import sys

import psutil

TIED = [sys.executable, "-P", "-m", "enginery_executor_ray.tied"]
STARTER = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
input()
"""


def test_it_runs_as_it_does_alone() -> None:
    with subprocess.Popen(
        [*TIED, "enginery", "no-such-command"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as tied:
        assert tied.wait(60) == 2
        assert tied.stderr is not None
        assert "no-such-command" in tied.stderr.read()


def test_it_ends_with_the_process_that_started_it_however_that_ends() -> None:
    forever = [*TIED, "http.server", "--bind=127.0.0.1", "0"]
    with subprocess.Popen([sys.executable, "-c", STARTER, *forever], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        child = psutil.Process(int(starter.stdout.readline()))
        assert child.is_running()
        starter.kill()
    assert not psutil.wait_procs([child], timeout=20)[1]
