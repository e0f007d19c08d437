"""What clients leave behind that hang up: nothing."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from fake_engine import HELD

from enginery.serve.http.event_stream import ClientGone, unless_disconnected


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_has_its_requests_aborted(with_server, stream):
    """Over ASGI, as uvicorn tells it: the body, and later the disconnect."""

    async def scenario(live):
        body = {"prompt": ["hello", "world"], "max_tokens": 400, "ignore_eos": True, "seed": HELD, "stream": stream}
        hangs_up = asyncio.Event()
        sent = []

        async def receive():
            if not sent:
                sent.append("body")
                return {"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}
            await hangs_up.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b"", "root_path": ""}
        app = live.http._transport.app
        task = asyncio.create_task(app({**scope, "http_version": "1.1", "scheme": "http", "server": ("t", 80)}, receive, send))
        await live.until(lambda: len(live.said("submit")) == 2)
        await live.until(lambda: live.engine.meter.num_output >= 4 and len(sent) > stream)
        hangs_up.set()
        await task
        await live.until(lambda: len(live.said("abort")) == 2)
        assert not live.engine.groups
        assert (await live.complete("hello")).status_code == 200

    with_server(scenario)


def test_work_for_a_lost_client_is_cancelled():
    async def main():
        cancelled = asyncio.Event()

        async def work():
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()

        async def receive():
            return {"type": "http.disconnect"}

        with pytest.raises(ClientGone):
            await unless_disconnected(receive, work())
        assert cancelled.is_set()

    asyncio.run(main())


def test_a_hundred_disconnects_leave_nothing(with_server):
    async def scenario(live):
        for turn in range(24):
            tasks = [asyncio.create_task(live.complete("a b c", ignore_eos=True, max_tokens=400, seed=HELD)) for _ in range(4)]
            if turn % 3:
                await asyncio.sleep(0.002 * turn)
            else:
                await live.until(lambda tokens=live.engine.meter.num_output: live.engine.meter.num_output >= tokens + 8)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await live.complete("the last, so that the engine has taken in all before it", max_tokens=1)
        assert len(live.said("abort")) == len(live.said("submit")) - 1 >= 32
        assert not live.engine.groups

    with_server(scenario)
