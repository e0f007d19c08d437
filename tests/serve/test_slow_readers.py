"""Clients that read slowly, over real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
import uvicorn

from enginery.serve.http.connection import LimitedConfig, Limits
from enginery.serve.http.listening import bind

NUM_BYTES = 2 << 20
KEPT_BYTES = 64 << 10  # by the kernel, on each side; it takes twice as many
SEND_S = 1.0


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(NUM_BYTES).encode())]})
    await send({"type": "http.response.body", "body": bytes(NUM_BYTES)})


@pytest.fixture
def address():
    listening = bind("127.0.0.1", 0, num_connections=10, refusal=b"")
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KEPT_BYTES)
    config = LimitedConfig(
        app, Limits(send_s=SEND_S), listening.refusals, log_config=None, access_log=False, lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()[:2]
    server.should_exit = True
    thread.join(30)


@pytest.mark.parametrize(("waits_s", "pauses_s"), [(0.0, 0.06), (3 * SEND_S, 0.0)])
def test_a_client_that_goes_on_reading_gets_a_large_answer_and_one_that_stops_is_cut(address, waits_s, pauses_s):
    num_read, began_s = 0, time.monotonic()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KEPT_BYTES)
        client.connect(address)
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(waits_s)
        with contextlib.suppress(ConnectionResetError):
            while num_read < NUM_BYTES and (part := client.recv(KEPT_BYTES)):
                num_read += len(part)
                time.sleep(pauses_s)
    assert (num_read >= NUM_BYTES) == (waits_s < SEND_S), f"{num_read:,} bytes in {time.monotonic() - began_s:.1f} s"
