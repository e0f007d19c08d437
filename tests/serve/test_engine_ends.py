"""Whatever ends the engine's process, or what listens to it: everybody who waits is told."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from fake_engine import HELD
from serve.test_processes import request, sent, with_client

from enginery.config.schema import EngineOptions
from enginery.errors import EngineDied
from enginery.plugin.registry import Registry
from enginery.serve.engine import messages
from enginery.serve.engine.child import EngineChild
from enginery.serve.engine.client import EngineState

REAL_TIME = 40  # a signal that Python has no name for


def test_who_waits_for_an_order_is_told_that_the_engine_has_ended(folder):
    async def scenario(client):
        await client.ready()
        os.kill(client.child.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(client.order(messages.Flush()))
        await asyncio.sleep(0.1)
        os.kill(client.child.pid, REAL_TIME)
        os.kill(client.child.pid, signal.SIGCONT)
        with pytest.raises(EngineDied, match=f"was killed by signal {REAL_TIME}"):
            await waiting

    with_client(scenario, folder)


@pytest.mark.parametrize("where", ["listening", "watching"])
def test_a_bug_of_the_client_ends_the_engine_and_tells_everybody(folder, tmp_path, monkeypatch, caplog, where):
    def fail(*given):
        raise ZeroDivisionError("a bug")

    async def scenario(client):
        await client.ready()
        async with sent(client, [request(seed=HELD)]) as outputs:
            if where == "listening":
                monkeypatch.setattr(client, "_handle", fail)
            else:
                monkeypatch.setattr(client.child, "epitaph", fail)
                os.kill(client.child.pid, signal.SIGKILL)
            with pytest.raises(EngineDied, match="its client failed with ZeroDivisionError: a bug"):
                _ = [output async for output in outputs]
        assert client.state is EngineState.DEAD
        assert not client.child.is_running
        assert "Traceback" in caplog.text

    monkeypatch.setenv("FAKE_GO", str(tmp_path / "never"))
    with_client(scenario, folder)


def test_what_an_engine_writes_is_passed_on_in_whole_lines():
    code = "import os, time; raw = 'Straße\\rgrößer\\nund'.encode(); os.write(2, raw[:5]); time.sleep(0.3); os.write(2, raw[5:])"
    told = []

    async def main():
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            boot = messages.Boot(endpoint="", options=EngineOptions(), manifest=Registry.load(no_plugins=True).manifest)
            await EngineChild(process, boot, told.append).relay_stderr()

    asyncio.run(main())
    assert list(filter(None, told)) == ["Straße\rgrößer\n", "und"]
