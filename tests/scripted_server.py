"""A server that answers byte by byte as a test says, in a thread, and what sends it requests as engine bench serve does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

import pytest

from enginery.bench.serve_load import Call, Client

T = TypeVar("T")
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\r\n\r\ndata: [DONE]\n\n'


def event(text: str, finish: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}]}).encode() + b"\n\n"


STREAM = [event("a"), event("é\n\n"), event(""), event("", "length"), USAGE]


def chunked(body: bytes) -> bytes:
    return b"%x;ext=1\r\n%s\r\n" % (len(body), body)


class Scripted:
    """Answers a POST as `script` does, and keeps what it was asked."""

    def __init__(self) -> None:
        self.script: Callable[[asyncio.StreamWriter], object] = self.stream
        self.bodies: list[dict] = []
        self.heads: list[bytes] = []
        self.num_connections = self.num_open = self.most_open = 0
        self.pause_s = 0.0
        self.parts: Sequence[bytes] = [*map(chunked, STREAM), b"0\r\n\r\n"]
        self.models: object = {"data": [{"id": "m"}]}
        self.head_of_models = b"HTTP/1.1 200 OK\r\ncontent-length: LENGTH\r\n\r\n"

    async def stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in self.parts:
            writer.write(part)
            await asyncio.sleep(self.pause_s)

    async def hold_until_open(self, count: int) -> None:
        while self.most_open < count:
            await asyncio.sleep(0.001)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                body = await reader.readexactly(int(head.partition(b"Content-Length:")[2].split()[0]))
                if head.startswith(b"GET"):
                    answer = json.dumps(self.models).encode()
                    writer.write(self.head_of_models.replace(b"LENGTH", b"%d" % len(answer)) + answer)
                    if b"LENGTH" in self.head_of_models:
                        continue
                    return
                self.bodies.append(json.loads(body))
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
                await self.script(writer)
                self.num_open -= 1
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
def server() -> Iterator[tuple[Scripted, str]]:
    """It, and its address; it runs in a thread."""
    scripted, started = Scripted(), threading.Event()

    async def main() -> None:
        listener = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
        stop = asyncio.Event()
        scripted.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        scripted.stop = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)
        started.set()
        await stop.wait()
        listener.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    started.wait()
    yield scripted, scripted.url
    scripted.stop()
    thread.join()


def using(url: str, work: Callable[[Client], Awaitable[T]]) -> T:
    async def main() -> T:
        with contextlib.closing(Client(url)) as client:
            return await work(client)

    return asyncio.run(main())


def one(url: str) -> Call:
    return using(url, lambda client: client.call(b"{}", time.perf_counter()))
