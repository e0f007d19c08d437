"""Ranks that join an engine over tcp, in processes of their own, for tests; and what is there to join."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import noise
import psutil
import pytest
from free_ports import free_ports

from enginery.config.schema import EngineOptions
from enginery.engine.ranks.joined import JoinedRanks, Listening
from enginery.engine.ranks.keys import RankKey
from enginery.engine.ranks.wires import TcpWires
from enginery.errors import EnginError

PROMPTS = [[5, 77, 200, 31] * 9, [8, 9, 140], [3] * 20]
OPTIONS = {**noise.OPTIONS, "device": "cpu", "dtype": "float32", "num_pages": 64, "num_threads": 1, "step_deadline": 20.0}
MEMBER = "enginery.engine.ranks.process"
PROGRAM = str(Path(__file__).parent / "joined_engine.py")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "ranks.key"
    RankKey.new().write(file)
    return file


class Member:
    """An `engine rank` in a process of its own."""

    def __init__(self, address: str, key_file: Path, *flags: str, before: tuple[str, ...] = ()) -> None:
        command = [*before, sys.executable, "-m", "enginery", "rank", "--join", address, "--rank-key-file", str(key_file), *flags]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def end(self, timeout: float = 30) -> tuple[int, str]:
        """Its exit status, and what it wrote."""
        _, said = self.process.communicate(timeout=timeout)
        return self.process.returncode, said

    def rank(self) -> psutil.Process:
        """The process that it runs, once the engine has told it what to run."""
        end_s = time.monotonic() + 30
        while True:
            for child in psutil.Process(self.process.pid).children():
                if MEMBER in child.cmdline():
                    return child
            assert time.monotonic() < end_s
            time.sleep(0.02)


@pytest.fixture
def members() -> Iterator[list[Member]]:
    """What is in it at the end is ended."""
    made: list[Member] = []
    yield made
    for member in made:
        with member.process:
            member.process.kill()


def free_address() -> str:
    return f"tcp://127.0.0.1:{free_ports()}"


def options(key_file: Path, **changes: object) -> EngineOptions:
    given = {**OPTIONS, "tp": 2, "executor": "join", "listen": free_address(), "rank_key_file": str(key_file)}
    return EngineOptions(**{**given, **changes})


@contextlib.contextmanager
def listening(key_file: Path, count: int = 1, deadline_s: float = 20.0) -> Iterator[Listening]:
    """Where ranks may join, without an engine behind it."""
    wires = TcpWires("tcp://127.0.0.1:0", RankKey.read(str(key_file)), deadline_s=deadline_s)
    try:
        found = wires.joining(count)
        assert found is not None
        yield found
    finally:
        wires.close()


def in_background(wait: Callable[[], JoinedRanks]) -> Callable[[], JoinedRanks]:
    """Begin to wait; what is returned has the result."""
    found: list[JoinedRanks | EnginError] = []

    def run() -> None:
        try:
            found.append(wait())
        except EnginError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> JoinedRanks:
        thread.join(30)
        if isinstance(found[0], EnginError):
            raise found[0]
        return found[0]

    return result
