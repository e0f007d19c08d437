"""The folder of an engine's ranks stays when all of its processes are killed; a later engine removes it, and no other's."""

from __future__ import annotations

import os
import tempfile
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
LONG_AGO_S = 1_700_000_000


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
    left = engine_that_was_killed(temporary)
    os.utime(left, (LONG_AGO_S, LONG_AGO_S))
    HostWires().close()
    assert list(temporary.iterdir()) == []


def test_what_was_made_just_now_stays(temporary: Path) -> None:
    """It may be bound and not listen yet."""
    left = engine_that_was_killed(temporary)
    HostWires().close()
    assert left.is_socket()


def test_folders_of_engines_that_live_and_of_others_stay(temporary: Path) -> None:
    alive = HostWires()
    _, address = alive.bind(zmq.PULL, "reports")
    other = temporary / "enginery-mine" / "reports"
    other.parent.mkdir()
    other.write_text("a file that somebody wrote")
    for path in (Path(address.removeprefix("ipc://")), other):
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))
    HostWires().close()
    assert len(list(temporary.iterdir())) == 2
    alive.close()
    assert other.read_text()
