"""What is forked in place of a fresh interpreter is like one: tests/quick_processes.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import psutil
import pytest
import quick_processes
from pairwise import EVERYTHING

pytestmark = pytest.mark.skipif(EVERYTHING, reason="all processes are started as always")
TOLD = """
import asyncio, atexit, json, logging, os, resource, signal, sys, threading
atexit.register(lambda: print("the end"))
handlers = {name: str(signal.getsignal(signal.Signals[name])) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGCHLD")}
print(json.dumps({
    "arguments": sys.argv, "read": sys.stdin.read(), "folder": os.getcwd(), "path": sys.path,
    "environ": dict(os.environ), "handlers": handlers, "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "files": [number for number in range(3, 200) if os.path.exists(f"/proc/self/fd/{number}")],
    "parent": os.getppid(), "is_group": os.getpgid(0) == os.getpid(), "threads": threading.active_count(),
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
    "logging": [logging.root.level, len(logging.root.handlers)],
    "command": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
}), flush=True)
print("said", file=sys.stderr)
threading.Thread(target=lambda: print("a thread")).start()
sys.exit(3)
"""


def told(
    tmp_path: Path, how: contextlib.AbstractContextManager[None], *, session: bool = False, prefix: Sequence[str] = ()
) -> tuple[object, ...]:
    reading, writing = os.pipe()
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]), "WORD": "é"}
    with how:
        done = subprocess.run(
            [*prefix, sys.executable, "-c", TOLD, "one", "é", ""],
            input="given",
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environ,
            pass_fds=[writing],
            start_new_session=session,
            check=False,
        )
    os.close(reading)
    os.close(writing)
    said = json.loads(done.stdout.splitlines()[0])
    assert said["files"] == [writing]
    return done.returncode, done.stderr, done.stdout.splitlines()[1:], said


@pytest.mark.parametrize("session", [True, False])
def test_a_forked_process_is_as_a_fresh_one(tmp_path: Path, *, session: bool) -> None:
    mine = told(tmp_path, quick_processes.code_too(), session=session)
    fresh = told(tmp_path, quick_processes.own_processes(), session=session)
    mine[-1]["files"] = fresh[-1]["files"]
    assert mine == fresh
    assert mine[0] == 3


@pytest.mark.parametrize(
    "prefix",
    [("nohup",), quick_processes.with_files("-Sn", 123), quick_processes.with_files("-n", 123), ("env",)],
    ids=["nohup", "a soft limit", "a hard limit", "started as always"],
)
def test_a_command_that_runs_it_does_to_it_what_it_does_to_a_fresh_one(tmp_path: Path, prefix: tuple[str, ...]) -> None:
    mine = told(tmp_path, quick_processes.code_too(), prefix=prefix)
    fresh = told(tmp_path, quick_processes.own_processes(), prefix=prefix)
    for *_, said in (mine, fresh):
        said["files"] = []
        said["environ"] = {name: value for name, value in said["environ"].items() if name not in ("PWD", "OLDPWD", "SHLVL", "_")}
    assert mine == fresh
    assert (mine[-1]["limits"][0] == 123) == (prefix[0] == "sh")


FAMILY = """
import os, sys, threading
import quick_processes
threading.Thread(target=sys.stdin.read, daemon=True).start()
asked = "import os, signal, sys; print(os.getppid(), len(signal.pthread_sigmask(signal.SIG_BLOCK, ())), 'torch' in sys.modules)"
done = quick_processes.run_python("-c", asked, capture_output=True, text=True, check=True)
print(os.getpid(), done.stdout)
"""


def test_what_is_forked_forks_its_own_children() -> None:
    done = quick_processes.run_python("-c", FAMILY, capture_output=True, text=True, check=True)
    parent, *child = done.stdout.split()
    assert child == [parent, "0", "True"]


def test_it_is_a_child_that_signals_end_and_it_is_quick() -> None:
    with (
        quick_processes.code_too(),
        subprocess.Popen([sys.executable, "-c", "import torch, time; time.sleep(60)"]) as process,
    ):
        used = psutil.Process(process.pid).cpu_times()
        assert psutil.Process(process.pid).ppid() == os.getpid()
        process.send_signal(signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
    assert used.user + used.system < 0.5


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        (["-c", "import sys; print('enginery.cli.main' in sys.modules)"], {}),
        (["-m", "calendar", "2026", "1"], {}),
        (["-m", "enginery", "--version"], {"env": os.environ | {"TRITON_INTERPRET": "1"}}),
        (["-m", "enginery", "--version"], {"env": os.environ | {"OMP_NUM_THREADS": "3"}}),
        (["-m", "enginery", "--version"], {"process_group": 0}),
    ],
    ids=["code", "another module", "Triton", "threads", "a group"],
)
def test_what_is_not_the_engines_or_needs_more_is_started_as_always(
    command: list[str], changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick_processes.Nursery, "fork", None)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True, **changes)
    assert "True" not in done.stdout


def test_what_renders_templates_is_forked_from_a_process_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_processes.SMALL_NURSERY.fits(os.environ)  # starts it
    monkeypatch.setattr(quick_processes, "_started_as_always", None)
    command = [sys.executable, "-P", "-m", *quick_processes.SMALL]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        end_s = time.monotonic() + 60
        while list(filter(None, psutil.Process(process.pid).cmdline())) != command:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        assert psutil.Process(process.pid).memory_info().vms < 1 << 28, "of the 1 GiB that it may have"
    assert process.returncode == 0


def test_what_two_threads_have_forked_at_once_are_children_of_theirs() -> None:
    """An engine's process and a renderer of templates: the second is made while the first one's nursery is busy."""
    commands = [[sys.executable, "-c", "import sys; sys.stdin.read()"], [sys.executable, "-P", "-m", *quick_processes.SMALL]]
    for nursery in (quick_processes.NURSERY, quick_processes.SMALL_NURSERY):
        nursery.fits(os.environ)  # starts it
    busy = next(child for child in psutil.Process().children() if child.cmdline()[-1] == "whole")
    with quick_processes.code_too(), ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as running:
        busy.suspend()
        made = [threads.submit(subprocess.Popen, command, stdin=subprocess.PIPE) for command in commands]
        wait(made[1:], timeout=0.5)
        busy.resume()
        processes = [running.enter_context(each.result()) for each in made]
        assert [psutil.Process(process.pid).ppid() for process in processes] == [os.getpid()] * 2
