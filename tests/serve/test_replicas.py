"""Several engines behind one front: where requests go, what is told of them, and what is lost when one ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

import httpx
import psutil
import pytest
from fake_engine import HELD
from prometheus_client.parser import text_string_to_metric_families
from running import PATIENCE_S, get, serving, started, wait_until

from enginery.serve.engine import client as engine_client
from enginery.serve.engine import progress as engine_progress
from enginery.serve.engine import replicas
from enginery.serve.engine.messages import Flush, Profile
from enginery.serve.engine.progress import stalled_s, watch
from enginery.serve.engine.sent_prefixes import block_hashes

KILLED = "the engine's process was killed by SIGKILL"


def sent(live) -> list[int]:
    """Requests that each replica was sent."""
    return [replica.client.meter.num_begun for replica in live.service.engine.replicas]


def open_ones(live) -> list[int]:
    return [replica.client.meter.num_open for replica in live.service.engine.replicas]


def held(live, prompt: list[int], **body: object) -> asyncio.Task:
    """A stream that goes on for long, once it has begun."""
    return asyncio.create_task(live.complete(prompt, stream=True, max_tokens=400, ignore_eos=True, seed=HELD, **body))


async def labelled(live, name: str) -> dict[str, float]:
    text = (await live.http.get("/metrics")).text
    every = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {sample.labels["engine"]: sample.value for sample in every if sample.name == name}


def test_prompts_that_share_nothing_are_spread_and_equal_ones_go_where_they_were(with_server):
    async def scenario(live):
        prompts = [[number] * 200 for number in range(2, 6)]
        for prompt in prompts:
            await live.complete(prompt, max_tokens=2)
        assert sent(live) == [2, 2]
        for _ in range(3):
            await live.complete([*prompts[1], 7, 8], max_tokens=2)
        assert sent(live) == [2, 5]
        await live.complete([*prompts[1], 7, 8], max_tokens=2, cache_salt="another")
        assert sent(live) == [3, 5], "it shares nothing, and goes to the one that was sent less"

    with_server(scenario, dp=2)


def test_load_outweighs_a_prefix(with_server):
    """A held request of 400 tokens decodes, which is one token; before it began it is all that are not cached."""

    async def scenario(live):
        await live.complete([3] * 128, max_tokens=1)
        engine = live.service.engine
        os.kill(engine.replicas[0].client.child.pid, signal.SIGSTOP)
        waiting = [asyncio.create_task(live.complete([3] * 128 + [5] * 100, max_tokens=1))]
        await live.until(lambda: sent(live) == [2, 0])
        waiting.append(asyncio.create_task(live.complete([3] * 128 + [6] * 100, max_tokens=1)))
        await live.until(lambda: sent(live) == [3, 0])
        assert engine.replicas[0].client.meter.num_ahead == 200
        waiting.append(asyncio.create_task(live.complete([3] * 128 + [7] * 100, max_tokens=1)))
        await live.until(lambda: sent(live) == [3, 1])
        os.kill(engine.replicas[0].client.child.pid, signal.SIGCONT)
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 3
        assert [replica.client.meter.num_ahead for replica in engine.replicas] == [0, 0]
        assert [replica.client.meter.num_unstarted for replica in engine.replicas] == [0, 0]

    with_server(scenario, dp=2)


def test_one_body_s_prompts_are_spread_and_its_choices_stay_together(with_server):
    async def scenario(live):
        answer = await live.complete([[2] * 20, [3] * 20, [4] * 20, [5] * 20], max_tokens=30, n=3)
        assert sent(live) == [6, 6]
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(12))
        assert (await live.complete([[6] * 20, [7] * 600], max_tokens=1)).status_code == 400
        assert open_ones(live) == [0, 0]

    with_server(scenario, dp=2)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_kill_under_load_ends_its_own_streams_alone(with_server, restarts):
    async def scenario(live):
        streams = [held(live, [number] * 90) for number in range(2, 8)]
        replicas = live.service.engine.replicas
        await live.until(lambda: sum(replica.client.meter.num_output for replica in replicas) >= 6 * 90)
        assert open_ones(live) == [3, 3]
        os.kill(replicas[1].client.child.pid, signal.SIGKILL)
        await live.until(lambda: not replicas[1].client.child.is_running)
        answers = await asyncio.gather(*(live.complete([10 + number] * 90, max_tokens=2) for number in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4, "before it is known why it ended, too"
        await live.until(lambda: open_ones(live) == [3, 0])
        health = await live.http.get("/health/ready")
        assert (health.status_code, health.json()["status"]) == (200, "ready")
        assert health.json()["replicas"][0] == "ready"
        assert restarts or health.json()["replicas"][1] == "dead"
        assert (await live.complete([9] * 90, max_tokens=2)).status_code == 200
        if restarts:
            await live.until(lambda: replicas[1].state == "ready")
            lost = [block_hashes([number] * 90, "", size=64) for number in range(2, 8)]
            assert [replicas[1].prefixes.num_known(hashes) for hashes in lost] == [0] * 6
        live.release()
        texts = [(await stream).text for stream in streams]
        assert [text.endswith("data: [DONE]\n\n") and KILLED not in text for text in texts].count(True) == 3
        code = "engine_restarting" if restarts else "engine_died"
        assert sum(KILLED in text and f'"{code}"' in text for text in texts) == 3
        assert await labelled(live, "enginery:engine_restarts_total") == {"0": 0, "1": restarts}
        assert await labelled(live, "enginery:requests_open") == {"0": 0, "1": 0}
        if not restarts:
            assert (await labelled(live, "enginery:kv_pages_free"))["1"] == 0, "it has none any more"
        before = sent(live)
        await asyncio.gather(*(live.complete([20 + number] * 90, max_tokens=2) for number in range(8)))
        gained = [now - then for now, then in zip(sent(live), before, strict=True)]
        assert gained[1] == 0 if not restarts else gained[1] > 0
        assert (await live.http.get("/server_info")).json()["replicas"][1]["state"] == ("ready" if restarts else "dead")

    with_server(scenario, dp=2, restarts=restarts)


@contextlib.asynccontextmanager
async def watched(live, limit_s: float):
    """As the server does it."""
    live.service.watchdog_s = limit_s
    task = asyncio.create_task(watch(live.service.engine.replicas, limit_s))
    yield
    task.cancel()


@pytest.mark.parametrize("restarts", [0, 1])
def test_one_that_is_stuck_is_ended_while_another_serves(with_server, restarts):
    """Whoever asks for `/health/progress` is not told to restart the server, which would end the other's streams."""

    async def scenario(live):
        replicas = live.service.engine.replicas
        os.kill(replicas[1].client.child.pid, signal.SIGSTOP)
        async with watched(live, 2.0):  # on a busy machine the other may say nothing for a second
            asked = [asyncio.create_task(live.complete([number] * 90, max_tokens=2)) for number in range(2, 6)]
            await live.until(lambda: sent(live) == [2, 2])
            seen = set()
            while not all(task.done() for task in asked):
                seen.add((await live.http.get("/health/progress")).status_code)
                await asyncio.sleep(0.02)
            answers = sorted([await task for task in asked], key=lambda answer: answer.status_code)
            assert [answer.status_code for answer in answers] == [200, 200, 503, 503]
            assert "was killed: it completed no step for" in answers[-1].json()["error"]["message"]
            assert seen == {200}
            if restarts:
                await live.until(lambda: replicas[1].state == "ready")
            else:
                await live.until(lambda: replicas[1].state == "dead")
            assert (await live.complete([9] * 90, max_tokens=2)).status_code == 200
            assert (await live.http.get("/health/progress")).status_code == 200

    with_server(scenario, dp=2, restarts=restarts)


def test_nobody_is_sent_to_one_that_says_nothing_for_a_moment(with_server, monkeypatch):
    """Long before it counts as stuck, which one that prepares something does late."""
    monkeypatch.setattr(replicas, "_QUIET_S", 2.0)

    async def scenario(live):
        first = live.service.engine.replicas[0]
        await live.complete([3] * 128, max_tokens=1)
        os.kill(first.client.child.pid, signal.SIGSTOP)
        await live.until(lambda: time.monotonic() - first.client.heard_s > 2)
        assert (first.state, first.serves) == ("ready", True)
        assert (await live.complete([3] * 128, max_tokens=1)).status_code == 200
        assert sent(live) == [1, 1]
        os.kill(first.client.child.pid, signal.SIGCONT)
        await live.until(lambda: time.monotonic() - first.client.heard_s < 1)
        await live.complete([3] * 128 + [4], max_tokens=1)
        assert sent(live) == [2, 1], "of equals the first"

    with_server(scenario, dp=2)


@pytest.mark.parametrize("dp", [1, 2])
def test_one_that_says_nothing_is_stuck_though_its_clients_have_hung_up(with_server, monkeypatch, dp):
    """Nobody is sent to it any more, so nothing else would be noticed. On a busy machine the other may be silent for 2 s."""
    monkeypatch.setattr(engine_client, "_SILENCE_S", 2.0)

    async def scenario(live):
        last = live.service.engine.replicas[-1]
        os.kill(last.client.child.pid, signal.SIGSTOP)
        async with watched(live, 2.5):
            if dp > 1:
                assert "it completed no step for" in await last.died
            else:
                await live.until(lambda: stalled_s(last) > 2.5)
            progress = await live.http.get("/health/progress")
            assert (progress.status_code, progress.json()["status"]) == ((200, "idle") if dp > 1 else (503, "stuck"))
            if dp == 1:
                os.kill(last.client.child.pid, signal.SIGCONT)
                await live.until(lambda: stalled_s(last) == 0)

    with_server(scenario, dp=dp)


@pytest.mark.parametrize("dp", [1, 2])
def test_one_that_prepares_for_long_in_an_idle_moment_is_not_stuck(with_server, monkeypatch, tmp_path, dp):
    monkeypatch.setattr(engine_client, "_SILENCE_S", 0.5)
    monkeypatch.setenv("FAKE_PREPARES", str(tmp_path / "prepares"))
    prepares = tmp_path / f"prepares{dp - 1}"

    async def scenario(live):
        last = live.service.engine.replicas[-1]
        async with watched(live, 0.7):
            prepares.touch()
            await live.until(lambda: last.state == "silent")
            await asyncio.sleep(1.5)  # it is looked at several times
            progress = await live.http.get("/health/progress")
            assert (last.state, progress.status_code, progress.json()["status"]) == ("silent", 200, "idle")
            prepares.unlink()
            await live.until(lambda: last.state == "ready")
            os.kill(last.client.child.pid, signal.SIGSTOP)  # the next silence counts
            await live.until(lambda: stalled_s(last) > 0.7 or last.state == "dead")

    with_server(scenario, dp=dp)


@pytest.mark.parametrize("limit_s", [0.7, 1.5])
def test_one_that_prepares_may_keep_its_requests_waiting_but_not_for_ever(with_server, monkeypatch, tmp_path, limit_s):
    """Its requests came while something was compiled or captured in an idle moment."""
    monkeypatch.setattr(engine_progress, "_PREPARING_S", 2.0 if limit_s < 1 else 0.0)
    monkeypatch.setenv("FAKE_PREPARES", str(tmp_path / "prepares"))

    async def scenario(live):
        last = live.service.engine.replicas[-1]
        async with watched(live, limit_s):
            (tmp_path / "prepares1").touch()
            await asyncio.sleep(0.5)
            assert last.client.prepares
            asked = [asyncio.create_task(live.complete([number] * 90, max_tokens=2)) for number in range(2, 4)]
            await asyncio.sleep(1.5)
            if limit_s < 1:
                (tmp_path / "prepares1").unlink()
            assert sorted([(await task).status_code for task in asked]) == [200, 200 if limit_s < 1 else 503]

    with_server(scenario, dp=2)


def test_one_that_was_paused_with_its_server_is_not_stuck(with_server, monkeypatch):
    """By Ctrl-Z, or with its container: nobody was heard, and what it works at may take a while yet."""
    monkeypatch.setattr(engine_progress, "_PAUSE_S", 0.5)

    async def scenario(live):
        last = live.service.engine.replicas[-1]
        async with watched(live, 1.0):
            os.kill(last.client.child.pid, signal.SIGSTOP)
            asked = [asyncio.create_task(live.complete([number] * 90, max_tokens=2)) for number in range(2, 4)]
            await live.until(lambda: sent(live) == [1, 1])
            time.sleep(2)
            await asyncio.sleep(0.6)
            os.kill(last.client.child.pid, signal.SIGCONT)
            assert [(await task).status_code for task in asked] == [200, 200]

    with_server(scenario, dp=2)


def test_where_all_are_stuck_none_is_ended_and_the_server_says_so(with_server):
    """Watched while all of them are: the first to go on serves, so the others would be ended if they go on a moment later."""

    async def scenario(live):
        replicas = live.service.engine.replicas
        for replica in replicas:
            os.kill(replica.client.child.pid, signal.SIGSTOP)
        asked = [asyncio.create_task(live.complete([number] * 90, max_tokens=2)) for number in range(2, 4)]
        await live.until(lambda: sent(live) == [1, 1] and all(stalled_s(replica) > 0.5 for replica in replicas))
        async with watched(live, 0.5):
            await asyncio.sleep(1.5)  # each is looked at several times
            progress = await live.http.get("/health/progress")
            assert (progress.status_code, progress.json()["status"]) == (503, "stuck")
        for replica in replicas:
            os.kill(replica.client.child.pid, signal.SIGCONT)
        assert [(await task).status_code for task in asked] == [200, 200]

    with_server(scenario, dp=2)


def test_metrics_are_of_each_engine_and_add_up(with_server):
    async def scenario(live):
        await asyncio.gather(*(live.complete([number] * 70, max_tokens=4) for number in range(2, 8)))
        await live.until(lambda: all(client.stats.drafts.told for client in live.service.engine.clients))
        assert await labelled(live, "vllm:generation_tokens_total") == {"0": 12, "1": 12}
        assert await labelled(live, "vllm:prompt_tokens_total") == {"0": 210, "1": 210}
        assert await labelled(live, "vllm:time_to_first_token_seconds_count") == {"0": 3, "1": 3}
        assert await labelled(live, "enginery:kv_pages") == {"0": 64, "1": 64}
        assert set(await labelled(live, "enginery_engine_process_start_time_seconds")) == {"0", "1"}
        text = (await live.http.get("/metrics")).text
        names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(names) == len(set(names))
        progress = (await live.http.get("/health/progress")).json()
        assert (progress["status"], progress["replicas"]) == ("idle", ["ready", "ready"])
        assert progress["speculation"]["drafted_tokens"] == 40
        info = (await live.http.get("/server_info")).json()
        assert [replica["requests_sent"] for replica in info["replicas"]] == [3, 3]
        assert info["engine"]["num_pages"] == 64

    with_server(scenario, dp=2)


def test_orders_go_to_all_that_serve(with_server):
    async def scenario(live):
        engine = live.service.engine
        await live.complete([3] * 200, max_tokens=1)
        assert len(engine.replicas[0].prefixes) == 3
        assert await engine.order(Flush()) == "replica 0: 0 pages were freed; replica 1: 0 pages were freed"
        assert len(engine.replicas[0].prefixes) == 0
        stream = held(live, [4] * 90)
        await live.until(lambda: sum(open_ones(live)) == 1)
        (name,) = (times.request_id for client in engine.clients for times in client.open_requests)
        assert await engine.abort(name)
        assert "aborted by an administrator" in (await stream).text
        assert not await engine.abort(name)
        os.kill(engine.replicas[0].client.child.pid, signal.SIGKILL)
        await live.until(lambda: engine.replicas[0].state == "dead")
        assert await engine.order(Profile(3)) == "replica 1: the next 3 steps go to 3.json"

    with_server(scenario, dp=2)


def test_a_full_queue_on_one_sends_requests_to_the_other(with_server):
    async def scenario(live):
        await live.complete([2] * 400, max_tokens=1)
        for client in live.service.engine.clients:
            os.kill(client.child.pid, signal.SIGSTOP)
        tasks = [asyncio.create_task(live.complete([2] * 400, max_tokens=1)) for _ in range(4)]
        await live.until(lambda: sum(sent(live)) == 5)
        assert sent(live) == [1 + 2, 2], "the first has the prompt, and two requests wait there"
        for client in live.service.engine.clients:
            os.kill(client.child.pid, signal.SIGCONT)
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 4

    with_server(scenario, dp=2, max_queued_requests=2)


def engines_of(process) -> list[int]:
    children = psutil.Process(process.pid).children()
    return [child.pid for child in children if "fake_engine" in " ".join(child.cmdline()) and child.status() != "zombie"]


def test_the_server_ends_with_the_last_engine_and_says_why(folder):
    with started(folder, dp=3) as (process, url), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        first, second, last = engines_of(process)
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: client.get("/health").json()["replicas"] == ["ready", "dead", "ready"])
        os.kill(last, signal.SIGKILL)
        wait_until(lambda: client.get("/health").json()["replicas"] == ["ready", "dead", "dead"])
        assert client.post("/v1/completions", json={"prompt": "hello world"}).status_code == 200
        os.kill(first, signal.SIGTERM)  # which it leaves to its parent
        os.kill(first, signal.SIGABRT)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert "replica 1 has ended and is not started again, 2 of 3 are left" in err
    assert "replica 2 has ended and is not started again, 1 of 3 are left" in err
    assert process.returncode == 1
    assert err.strip().splitlines()[-1] == "engine: the engine's process was killed by SIGABRT"


def test_the_embedded_model_is_served_by_two_engines():
    prompt = "The first step of every request is "
    with (
        serving("--dp", "2", "--dtype", "float32", "--device", "cpu") as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):

        def text(seed: int) -> str:
            body = {"prompt": prompt * 8 + "x" * seed, "max_tokens": 8, "temperature": 0}
            return client.post("/v1/completions", json=body).json()["choices"][0]["text"]

        first = [text(seed) for seed in range(4)]
        assert first == [text(seed) for seed in range(4)]
        info = get(f"{url}/server_info").json()
        assert len(info["replicas"]) == 2
        assert sum(replica["requests_sent"] for replica in info["replicas"]) == 8
        assert [replica["num_pages"] for replica in info["replicas"]] == [256, 256]
        assert get(f"{url}/health/ready").json() == {"status": "ready", "replicas": ["ready", "ready"]}
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": ["hello "] * 2 + ["x"], "max_tokens": 40, "ignore_eos": True, "temperature": 5.0}
        first, again = (choice["text"] for choice in client.post("/v1/completions", json=body).json()["choices"][:2])
        assert first != again
