"""An engine that ends by itself is started again, so often as `--restarts` allows; the front stays meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest
from fake_engine import BREAK, HELD
from running import PATIENCE_S, SERVER, child_of, started, wait_until

from enginery.errors import ConfigError
from enginery.serve.engine import replicas

KILLED = "the engine's process was killed by SIGKILL"


def restarts_of(metrics: str) -> float:
    return next(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("enginery:engine_restarts_total{"))


def test_streams_end_with_an_error_and_later_requests_are_served_again(with_server, monkeypatch):
    async def scenario(live):
        stream = asyncio.create_task(
            live.complete("hello world", stream=True, max_tokens=400, ignore_eos=True, seed=HELD),
        )
        await live.until(lambda: live.engine.meter.num_output)
        before = live.engine
        os.kill(before.child.pid, signal.SIGKILL)
        text = (await stream).text
        assert KILLED in text
        assert '"engine_restarting"' in text
        await live.until(lambda: live.service.engine.state == "ready")
        assert live.engine is not before
        assert (await live.complete("hello world")).json()["choices"][0]["text"] == "hello world"
        assert restarts_of((await live.http.get("/metrics")).text) == 1
        assert live.engine.meter.num_open == 0
        assert live.engine.meter.ended["stop"] == 1

    with_server(scenario, restarts=1)


def test_while_it_starts_again_everybody_is_told_why(with_server, monkeypatch):
    async def scenario(live):
        monkeypatch.setenv("FAKE_LOAD_S", "600")
        os.kill(live.engine.child.pid, signal.SIGKILL)
        await live.until(lambda: live.service.engine.replicas[0].num_restarts)
        for answer in (await live.complete("x"), await live.http.get("/v1/models")):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "engine_restarting"
            assert KILLED in answer.json()["error"]["message"]
        for path in ("/health", "/health/ready"):
            health = await live.http.get(path)
            assert (health.status_code, health.json()) == (503, {"status": "restarting"})
        progress = await live.http.get("/health/progress")
        assert (progress.status_code, progress.json()["status"]) == (200, "restarting")
        assert (await live.http.get("/health/live")).status_code == 200

    with_server(scenario, restarts=1)


def test_the_log_says_why_and_how_often_it_may_yet_happen(with_server, caplog):
    def said():
        return [record.getMessage() for record in caplog.records if record.name == "enginery.serve.engine.replicas"]

    async def scenario(live):
        await live.complete("x", seed=BREAK)
        await live.until(lambda: len(said()) == 2)
        again, serves = said()
        assert again.startswith(
            "the engine is started again, 1 times more at the most; it ended: the engine broke: ZeroDivisionError"
        )
        assert serves.startswith("the engine serves again, after ")

    with_server(scenario, restarts=2)


def test_every_death_counts_and_the_last_one_ends_the_server(folder):
    with started(folder, restarts=2) as (process, url), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        seen = set()
        for _ in range(3):
            wait_until(lambda: client.get("/health").status_code == 200)
            seen.add(child_of(process))
            os.kill(child_of(process), signal.SIGKILL)
            wait_until(lambda: client.get("/health").status_code == 503)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert len(seen) == 3
        assert process.returncode == 1
        assert err.strip().splitlines()[-1].startswith(f"engine: {KILLED}")


def test_a_start_that_fails_is_not_tried_again(folder):
    command = [sys.executable, SERVER, str(folder), "0", "broken", "1", json.dumps({"restarts": 5})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stderr) == (2, "engine: the weights are gone; fetch them again\n")


def test_one_that_cannot_start_again_uses_the_count_up(folder, monkeypatch, tmp_path):
    """Of three restarts none succeeds: what it needs is gone."""
    go = tmp_path / "exists"
    go.touch()
    monkeypatch.setenv("FAKE_NEEDS", str(go))
    with started(folder, restarts=3) as (process, _):
        go.unlink()
        os.kill(child_of(process), signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert err.count("the engine is started again") == 3
    assert (process.returncode, err.strip().splitlines()[-1]) == (2, "engine: the weights are gone; fetch them again")


def test_a_signal_while_it_starts_again_ends_the_server(folder, monkeypatch, tmp_path):
    go = tmp_path / "quick"
    go.touch()
    monkeypatch.setenv("FAKE_SLOW_WITHOUT", str(go))
    with started(folder, restarts=1) as (process, url), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        go.unlink()
        os.kill(child_of(process), signal.SIGKILL)
        wait_until(lambda: client.get("/health").json() == {"status": "restarting"})
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("num_refused", [1, 3])
def test_where_the_system_refuses_a_process_another_is_tried_while_restarts_are_left(with_server, monkeypatch, caplog, num_refused):
    monkeypatch.setattr(replicas, "_AGAIN_S", 0.05)

    async def scenario(live):
        (replica,) = live.service.engine.replicas
        start, left = replica._start, iter(range(num_refused))

        async def refuse(**given):
            if next(left, None) is not None:
                raise ConfigError("an engine cannot be started: [Errno 12] Cannot allocate memory")
            return await start(**given)

        monkeypatch.setattr(replica, "_start", refuse)
        os.kill(live.engine.child.pid, signal.SIGKILL)
        if num_refused == 1:
            await live.until(lambda: replica.state == "ready" and replica.num_restarts == 2)
            assert (await live.complete("hello world")).json()["choices"][0]["text"] == "hello world"
        else:
            assert "Cannot allocate memory" in await live.service.engine.died
            assert live.service.engine.state == "dead"
        assert caplog.text.count("could not be started again: an engine cannot be started: [Errno 12]") == num_refused

    with_server(scenario, restarts=3)


def test_one_with_other_plugins_is_ended_and_not_started_again(with_server):
    async def scenario(live):
        before = live.engine
        before.manifest = SimpleNamespace(digest=lambda: "what it was started with")
        os.kill(before.child.pid, signal.SIGKILL)
        assert "loaded other plugins than this one" in await live.service.engine.died
        assert (live.service.engine.state, live.service.engine.replicas[0].num_restarts) == ("dead", 1)
        assert not live.engine.child.is_running

    with_server(scenario, restarts=3)


def test_a_bug_of_what_looks_after_an_engine_is_told(with_server, caplog):
    async def scenario(live):
        live.service.engine.is_back = lambda facts: 1 / 0
        os.kill(live.engine.child.pid, signal.SIGKILL)
        assert "failed with ZeroDivisionError" in await live.service.engine.died
        assert "nothing looks after the engine any more" in caplog.text
        assert "failed with ZeroDivisionError" in str(live.service.engine.death())

    with_server(scenario, restarts=3)
