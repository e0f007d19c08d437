"""The engine's process begins with `engine serve`, and imports while that finds out what to serve."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import subprocess
import sys

import pytest
import quick_processes
from fake_engine import COMMAND
from process_table import wait_until_gone

from enginery.child_process import ENGINE_COMMAND, begin, begun_ahead, take
from enginery.cli.main import main
from enginery.config.schema import EngineOptions
from enginery.plugin.registry import Registry
from enginery.serve.engine.client import EngineClient
from enginery.serve.engine.process import _import_engine

WAITS = (
    "import sys\n"
    "from enginery.serve.engine.process import run\n"
    "sys.exit(run(None, before=lambda: print('it imports', file=sys.stderr, flush=True)))\n"
)


def test_it_imports_before_it_is_told_what_to_build_and_ends_with_who_began_it():
    with quick_processes.code_too(), begin([sys.executable, "-c", WAITS]) as process:
        assert process.stderr.readline() == b"it imports\n"
        process.stdin.close()
        assert (process.wait(), process.stderr.read()) == (1, b"")


def test_what_it_cannot_import_is_told_when_it_builds(monkeypatch):
    monkeypatch.setitem(sys.modules, "enginery.engine.engine", None)
    _import_engine()


def test_one_engine_takes_it_and_the_next_begins_its_own(folder):
    async def started(begun: list[subprocess.Popen[bytes]]) -> int:
        manifest = Registry.load(no_plugins=True).manifest
        client = await EngineClient.start(EngineOptions(model=str(folder)), manifest, begin=functools.partial(take, begun, COMMAND))
        try:
            await client.ready()
            return client.child.pid
        finally:
            await client.stop()

    with begun_ahead(COMMAND) as begun:
        ahead = begun[0].pid
        assert asyncio.run(started(begun)) == ahead
        assert not begun
        assert asyncio.run(started(begun)) != ahead


def test_it_is_ended_if_nobody_takes_it():
    with pytest.raises(KeyError), begun_ahead(["sleep", "60"]) as (process,):
        raise KeyError
    wait_until_gone(process.pid)
    assert process.stdin.closed


def test_the_command_begins_it_first_and_hands_it_on(monkeypatch, capfd):
    told = []

    @contextlib.contextmanager
    def noted(*command: object):
        told.append(command)
        yield ["the process"]

    monkeypatch.setattr("enginery.cli.serve.begun_ahead", noted)
    monkeypatch.setattr("enginery.cli.serve_checks.check_before_start", lambda *_, **__: told.append("checked"))
    monkeypatch.setattr("enginery.serve.server.serve", lambda options, registry, settings, display: told.append(settings.begun))
    with pytest.raises(SystemExit):
        main(["serve", "--no-plugins", "--port", "0"])
    assert told == [(), "checked", ["the process"]]
    assert begun_ahead.__wrapped__.__defaults__ == (ENGINE_COMMAND,)
