"""The engine's process: how it starts, fails, dies, and what is told of it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import stat
import subprocess
import sys
from functools import partial

import msgspec
import pytest
import quick_processes
from fake_engine import BREAK, COMMAND, FAIL, HELD, PLUGIN, FakeEngine
from process_table import is_running, wait_until_gone
from running import PATIENCE_S

from enginery.child_process import begin
from enginery.config.schema import EngineOptions
from enginery.contracts.request import GenerationRequest, SamplingParams
from enginery.errors import ConfigError, EngineDied, EnginError, QueueFull, RequestError
from enginery.plugin.registry import Registry
from enginery.serve.engine import client as engine_client
from enginery.serve.engine import messages
from enginery.serve.engine.client import EngineClient, EngineState
from enginery.serve.engine.outputs import Sent, generate
from enginery.serve.engine.process import EngineLoop
from enginery.serve.http.faults import Fault


def request(name="r", prompt=(5, 6, 7), **params):
    return GenerationRequest(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**params))


def with_client(scenario, folder, *, command=COMMAND, **options):
    async def main():
        manifest = Registry.load(no_plugins=True).manifest
        client = await EngineClient.start(EngineOptions(model=str(folder), **options), manifest, begin=partial(begin, command))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scenario(client)
        finally:
            await client.stop()

    asyncio.run(main())


def sent(client, requests):
    return generate([Sent(client, each) for each in requests])


async def drained(client, *requests):
    async with sent(client, requests) as outputs:
        return [output async for output in outputs]


class IdleLink:
    """Nothing comes for three turns, then the word to stop."""

    def __init__(self):
        self.turns = 3

    def poll(self, timeout_ms):
        self.turns -= 1
        return self.turns < 0

    def recv(self):
        return messages.encode(messages.Stop())

    def send(self, frame):
        pass


@pytest.mark.parametrize("prepared", [True, False])
def test_objects_of_a_prepared_engine_are_never_searched_for_garbage(monkeypatch, prepared):
    monkeypatch.setattr(FakeEngine, "prepare", lambda self: not prepared)
    try:
        EngineLoop(FakeEngine(EngineOptions(model="any")), IdleLink()).run()
        assert (gc.get_freeze_count() > 10_000) == prepared
    finally:
        gc.unfreeze()


def test_messages_survive_the_way_there_and_back():
    params = SamplingParams(logit_bias={3: 1.5}, stop=("a", "b"), seed=2**63 - 1, logprobs=2)
    whole = GenerationRequest(request_id="x", prompt_token_ids=(1, 2), params=params, priority=-3, cache_salt="s")
    for each in (request(), whole):
        assert messages.decode_to_engine(messages.encode(messages.Submit.of([each]))).whole() == [each]


def test_what_came_while_nobody_took_it_is_one_output_of_each_request(tmp_path):
    async def scenario(client):
        await client.ready()
        asked = [request(name, prompt=(5, 6, 7, 8), logprobs=0, max_tokens=3) for name in ("a", "b")]
        promptly = await drained(client, *asked)
        async with sent(client, asked) as outputs:
            while client.meter.num_open:
                await asyncio.sleep(0.01)
            late = [output async for output in outputs]
        assert [output.request_id for output in late] == ["a", "b"]
        for output in late:
            steps = [step for step in promptly if step.request_id == output.request_id]
            assert output.token_ids == sum((step.token_ids for step in steps), ())
            assert output.logprobs == sum((step.logprobs for step in steps), ())
            assert output.finish_reason == steps[-1].finish_reason is not None

    with_client(scenario, tmp_path)


def test_what_had_come_is_given_before_the_error_that_ends_it(tmp_path):
    async def scenario(client):
        await client.ready()
        async with sent(client, [request(seed=HELD)]) as outputs:
            while not client.meter.num_output:
                await asyncio.sleep(0.01)
            await client.abort("r")
            assert (await anext(outputs)).token_ids
            with pytest.raises(EnginError, match="administrator"):
                await anext(outputs)

    with_client(scenario, tmp_path)


def test_the_socket_is_for_nobody_else_and_leaves_nothing_behind_when_all_are_killed(folder):
    async def scenario(client):
        assert stat.S_IMODE(client._directory.stat().st_mode) == 0o700
        await client.ready()
        assert not client._directory.exists()
        assert len(await drained(client, request())) > 0

    with_client(scenario, folder)


def test_an_engine_that_cannot_start_says_why_with_its_exit_code(folder, capfd):
    async def scenario(client):
        with pytest.raises(EngineDied, match=r"^the weights are gone; fetch them again$") as caught:
            await client.ready()
        assert caught.value.exit_code == 2
        assert client.state is EngineState.DEAD

    with_client(scenario, folder, device="broken")
    assert "Traceback" not in capfd.readouterr().err


def test_why_an_engine_cannot_start_is_told_when_the_front_is_late_to_hear_it(folder, monkeypatch):
    listen = EngineClient._listen

    async def listen_late(client):
        while client.child.is_running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        await listen(client)

    async def scenario(client):
        with pytest.raises(EngineDied, match=r"^the weights are gone; fetch them again$"):
            await client.ready()

    monkeypatch.setattr(EngineClient, "_listen", listen_late)
    with_client(scenario, folder, device="broken")


def test_a_command_that_dies_at_once_is_reported_after_its_last_words(folder, capfd):
    async def scenario(client):
        with pytest.raises(EngineDied, match=r"^the engine's process ended with exit code 3$"):
            await client.ready()
        assert capfd.readouterr().err == "no such luck\n"

    with_client(scenario, folder, command=(sys.executable, "-c", "import sys; print('no such luck', file=sys.stderr); sys.exit(3)"))


def test_stopping_while_loading_is_quick(folder, monkeypatch):
    monkeypatch.setenv("FAKE_LOAD_S", "600")

    async def scenario(client):
        assert client.state is EngineState.LOADING
        await client.stop(grace_s=600)

    with_client(scenario, folder)


def test_an_engine_s_bug_ends_it_and_names_the_root_cause(folder, capfd):
    async def scenario(client):
        await client.ready()
        with pytest.raises(EngineDied, match="ZeroDivisionError: a bug of the engine"):
            await drained(client, request(seed=BREAK))
        with pytest.raises(EngineDied):
            await drained(client, request("later"))

    with_client(scenario, folder)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_killed_engine_fails_everything_in_flight(with_server):
    async def scenario(live):
        body = {"prompt": "hello world", "max_tokens": 400, "ignore_eos": True, "seed": HELD}
        tasks = [asyncio.create_task(live.post("/v1/completions", **body)) for _ in range(3)]
        stream = asyncio.create_task(live.post("/v1/completions", **body, stream=True))
        await live.until(lambda: len(live.said("submit")) == 4)
        os.kill(live.engine.child.pid, signal.SIGKILL)
        for response in await asyncio.gather(*tasks):
            assert response.status_code == 503
            assert "SIGKILL" in response.json()["error"]["message"]
        assert "SIGKILL" in (await stream).text
        assert live.engine.meter.ended == {"error": 4}  # and not of clients that hung up
        health = await live.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "dead"})
        assert (await live.complete("x")).status_code == 503
        assert (await live.http.get("/v1/models")).status_code == 503

    with_server(scenario)


@pytest.mark.parametrize("after_s", [0, 0.01, 0.1, 0.2])
def test_a_request_to_an_engine_that_just_died_is_answered(with_server, after_s):
    async def scenario(live):
        await live.complete("x")
        os.kill(live.engine.child.pid, signal.SIGKILL)
        await asyncio.sleep(after_s)
        async with asyncio.timeout(PATIENCE_S):
            assert (await live.complete("x", n=3)).status_code == 503

    with_server(scenario)


def test_a_request_over_which_a_plugin_fails_is_refused_alone(with_server):
    async def scenario(live):
        refused, fine = await asyncio.gather(live.complete("hello world", seed=PLUGIN), live.complete("hello world"))
        assert (refused.status_code, fine.status_code) == (500, 200)
        assert refused.json()["error"]["message"].startswith("odd-policy could not give a request its place")
        assert live.engine.meter.num_open == 0

    with_server(scenario)


def test_one_request_s_failure_is_its_own(with_server):
    async def scenario(live):
        failed, fine = await asyncio.gather(live.complete("hello world", seed=FAIL), live.complete("hello world"))
        assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
        assert "NaN" in failed.json()["error"]["message"]
        assert fine.json()["choices"][0]["text"] == "hello world"
        events = (await live.complete("hello world", seed=FAIL, stream=True)).text
        assert "NaN" in events
        assert (await live.http.get("/health")).status_code == 200

    with_server(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_answers_429_and_runs_none_of_the_group(with_server, stream):
    async def scenario(live):
        response = await live.complete(["x y z"] * 5, seed=HELD, max_tokens=400, ignore_eos=True, stream=stream)  # all are held
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "queue_full"
        await live.until(lambda: len(live.said("abort")) == 3)
        assert live.engine.meter.ended == {"rejected": 5}, "none was admitted, so none is an abort"
        assert live.engine.meter.num_open == 0
        assert (await live.complete("hello")).status_code == 200

    with_server(scenario, max_queued_requests=3)


def test_leaving_a_group_aborts_what_is_open(folder):
    async def scenario(client):
        await client.ready()
        async with sent(client, [request("a", max_tokens=3), request("b", ignore_eos=True, seed=HELD)]) as outputs:
            finished = False
            while not finished:
                output = await anext(outputs)
                finished = output.finish_reason is not None
            assert outputs.open == {"b"}
        async with sent(client, [request("c", max_tokens=2)]) as outputs:
            assert [token_id async for output in outputs for token_id in output.token_ids] == [5, 6]

    with_client(scenario, folder)


def test_a_request_may_end_after_the_engine_was_stopped(folder):
    async def scenario(client):
        await client.ready()
        async with sent(client, [request(ignore_eos=True, seed=HELD)]):
            await client.stop()

    with_client(scenario, folder)


def test_what_clients_are_told_of_a_death_is_whole(folder):
    async def scenario(client):
        with pytest.raises(EngineDied) as caught:
            await client.ready()
        assert Fault.of(caught.value).message == "the engine's process ended with exit code 3"

    with_client(scenario, folder, command=(sys.executable, "-c", "import sys; print('one\\ntwo', file=sys.stderr); sys.exit(3)"))


def test_rejection_is_told_from_failure(folder):
    async def scenario(client):
        await client.ready()
        with pytest.raises(QueueFull):
            await drained(client, request("a"))

    with_client(scenario, folder, max_queued_requests=0)
    assert issubclass(QueueFull, RequestError)


def test_a_malformed_frame_is_dropped_on_both_sides(folder, capfd, caplog):
    async def scenario(client):
        await client.ready()
        for frame in (b"", b"\xc1", os.urandom(64), msgspec.msgpack.encode({"type": "submit", "request": 5})):
            await client._link.send(frame)
        async with sent(client, [request()]) as outputs:
            assert sum([len(output.token_ids) async for output in outputs]) == 4
        assert client.state is EngineState.READY

    with_client(scenario, folder)
    assert capfd.readouterr().err.count("malformed frame") == 4


def test_an_order_that_a_busy_engine_does_not_get_to_is_told_from_loading(folder, monkeypatch):
    monkeypatch.setattr(engine_client, "_ANSWER_S", 0.05)

    async def refusal(client):
        with pytest.raises(EnginError) as caught:
            await client.order(messages.Flush())
        fault = Fault.of(caught.value)
        return fault.status, fault.code, fault.headers["Retry-After"]

    async def scenario(client):
        assert await refusal(client) == (503, "loading", "1")
        await client.ready()
        os.kill(client.child.pid, signal.SIGSTOP)
        assert await refusal(client) == (503, "busy", "1")
        os.kill(client.child.pid, signal.SIGCONT)
        monkeypatch.setattr(engine_client, "_ANSWER_S", PATIENCE_S)
        assert await client.order(messages.Flush()) == "0 pages were freed"

    monkeypatch.setenv("FAKE_LOAD_S", "1")
    with_client(scenario, folder)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_engine_never_outlives_its_parent(folder, is_stopped):
    code = (
        "import asyncio, sys\n"
        "from functools import partial\n"
        "from enginery.child_process import begin\n"
        "from enginery.config.schema import EngineOptions\n"
        "from enginery.plugin.registry import Registry\n"
        "from enginery.serve.engine.client import EngineClient\n"
        "async def main():\n"
        "    manifest = Registry.load(no_plugins=True).manifest\n"
        f"    begun, options = partial(begin, {COMMAND!r}), EngineOptions(model={str(folder)!r})\n"
        "    client = await EngineClient.start(options, manifest, begin=begun)\n"
        "    await client.ready()\n"
        "    print(client.child.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with quick_processes.code_too(), subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        assert is_running(child)
        if is_stopped:  # then only the kernel can end it
            os.kill(child, signal.SIGSTOP)
        parent.kill()
        parent.wait()
    wait_until_gone(child)


def test_a_place_that_cannot_hold_the_socket_is_told(folder, tmp_path, monkeypatch):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(ConfigError, match="set TMPDIR"):
        with_client(None, folder)
    assert not list(long.iterdir())
