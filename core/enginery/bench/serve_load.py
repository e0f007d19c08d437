"""`engine bench serve`: loads on a server with OpenAI's API, and what its clients see. Imports no torch.

One thread sends everything. It reads the sockets itself, because an HTTP library takes longer for a piece of a stream than a fast
server for a token; how busy it was, and how late, is in each report.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

import msgspec

from enginery.bench.report import Row, percentiles
from enginery.errors import ConfigError, EnginError

_ANSWER_S: Final = 600.0  # a request that takes longer has failed
_GET_S: Final = 20.0
_IDLE_S: Final = 2.0  # some servers close a connection that was idle for 5 s
_TICK_S: Final = 0.01
_PIECE: Final = 1 << 16
_CUT: Final = "the server closed the connection in the middle of its answer"


@dataclass(frozen=True, kw_only=True)
class Load:
    """lengths: (prompt tokens, output tokens) per request; shared_prefix: so many first tokens are the same in all prompts.

    rate: requests per second, at random times (Poisson); None: `concurrency` at once, and the next when one has ended.
    """

    lengths: tuple[tuple[int, int], ...]
    rate: float | None = None
    concurrency: int = 1
    shared_prefix: int = 0
    temperature: float = 0.0
    seed: int = 1

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g}/s"

    def bodies(self, model: str, vocab_size: int) -> list[bytes]:
        """Of the requests. Prompts are other ones each time, so that a server has none of them cached from before."""
        draw, ids = random.Random(), range(10, vocab_size)
        prefix = draw.choices(ids, k=self.shared_prefix)
        common = {"model": model, "temperature": self.temperature, "ignore_eos": True, "stream": True}
        return [
            msgspec.json.encode(
                common
                | {"prompt": prefix + draw.choices(ids, k=length - len(prefix)), "max_tokens": count}
                | {"stream_options": {"include_usage": True}}
            )
            for length, count in self.lengths
        ]


class ModelCard(msgspec.Struct):
    """A model as a server describes it. root: its folder, where the server says so."""

    id: str
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[ModelCard]


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


_events: Final = msgspec.json.Decoder(_Event)


@dataclass(slots=True, eq=False)
class Call:
    """One request as its client sees it. due_s: when it was to be sent; times: when each piece of its text came.

    is_whole: the server said that the answer is complete.
    """

    due_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    is_whole: bool = False
    error: str | None = None

    async def read(self, parts: AsyncIterable[bytes]) -> None:
        """Read the whole stream. One without text, or that ends before its answer does, is an error."""
        rest = b""
        async for part in parts:
            now_s = time.perf_counter()
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                self.take(line.rstrip(), now_s)
        is_whole = self.is_whole or rest.rstrip().endswith(b"[DONE]")
        self.error = self.error or ("the stream had no text" if not self.times else None if is_whole else "the stream ended early")

    def take(self, line: bytes, now_s: float) -> None:
        """Read one line of the stream. now_s: when it came."""
        self.is_whole |= line.endswith(b"[DONE]")
        if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
            return
        event = _events.decode(line[5:])
        if event.error is not None:
            self.error = f"in the stream: {event.error}"
        if event.usage is not None:
            self.num_tokens = event.usage.completion_tokens
        for choice in event.choices[:1]:
            self.is_whole |= choice.finish_reason is not None
            if choice.text or (self.times and choice.finish_reason is None):  # a token of part of a character has no text
                self.times.append(now_s)


class Client:
    """Keeps connections open for the next request; close it in the loop that used it."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--url is {url}, but must be as http://127.0.0.1:8000: {error}") from error
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(f"--url is {url}, but must be as http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/").removesuffix("/v1")
        self.host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = True if parts.scheme == "https" else None
        self._path = urlsplit(self.url).path
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {parts.netloc}\r\n{authorization}Content-Type: application/json\r\n"
        self._idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []

    def close(self) -> None:
        """Close all connections that wait for a request."""
        while self._idle:
            self._idle.pop()[2].close()

    async def get(self, path: str) -> tuple[int, bytes]:
        """The status and the whole body. Raises `OSError`, also where the server does not answer."""
        try:
            async with asyncio.timeout(_GET_S), self._answer("GET", path, b"") as (status, parts):
                return status, b"".join([part async for part in parts])
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {_GET_S:g} s") from error

    async def first_model(self) -> ModelCard:
        """The first that the server lists. Raises `EnginError` if it has none."""
        try:
            status, body = await self.get("/v1/models")
            if status == 200:
                return msgspec.json.decode(body, type=_Models).data[0]
            why = _refusal(status, body)
        except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
        raise EnginError(f"{self.url}/v1/models does not name a model ({why}); is it a server with OpenAI's API?")

    async def call(self, body: bytes, due_s: float) -> Call:
        """Send it and read all of its stream; a failure is in the result."""
        call = Call(due_s, sent_s=time.perf_counter())
        try:
            async with asyncio.timeout(_ANSWER_S), self._answer("POST", "/v1/completions", body) as (status, parts):
                if status == 200:
                    await call.read(parts)
                else:
                    call.error = _refusal(status, b"".join([part async for part in parts]))
        except (OSError, EOFError, ValueError) as error:  # TimeoutError and broken streams too
            call.error = f"{type(error).__name__} {error}".strip()
        call.ended_s = time.perf_counter()
        call.num_tokens = call.num_tokens or len(call.times)
        return call

    @contextlib.asynccontextmanager
    async def _answer(self, method: str, path: str, body: bytes) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        while self._idle and self._idle[-1][0] < time.perf_counter() - _IDLE_S:
            self._idle.pop()[2].close()
        _, reader, writer = (
            self._idle.pop() if self._idle else (0, *await asyncio.open_connection(self.host, self._port, ssl=self._tls))
        )
        try:
            head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            yield int(answer.split()[1]), _parts(reader, answer)
        except BaseException:
            writer.close()
            raise
        if b"connection: close" in answer or answer.startswith(b"http/1.0") or reader.at_eof():
            writer.close()
        else:
            self._idle.append((time.perf_counter(), reader, writer))


def _refusal(status: int, body: bytes) -> str:
    """What an answer of another status than 200 says, in one line."""
    return f"status {status}: {' '.join(body.decode(errors='replace').split())[:500]}"


def _parts(reader: asyncio.StreamReader, head: bytes) -> AsyncIterator[bytes]:
    """The pieces of the body as they come, whichever way its end is told."""
    if b"transfer-encoding: chunked" in head:
        return _chunks(reader)
    length = head.partition(b"content-length:")[2].split(maxsplit=1)
    return _pieces(reader, int(length[0]) if length else None)


async def _pieces(reader: asyncio.StreamReader, length: int | None) -> AsyncIterator[bytes]:
    left = sys.maxsize if length is None else length  # without a length, until the server closes
    while left and (data := await reader.read(min(left, _PIECE))):
        left -= len(data)
        yield data
    if left and length is not None:
        raise EOFError(_CUT)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    rest = b""
    while True:
        if not (data := await reader.read(_PIECE)):
            raise EOFError(_CUT)
        rest += data
        while (end := rest.find(b"\r\n")) >= 0:
            size = int(rest[:end].partition(b";")[0], 16)
            if len(rest) < end + size + 4:
                break
            if size == 0:
                return
            yield rest[end + 2 : end + 2 + size]
            rest = rest[end + size + 4 :]


async def run_load(client: Client, bodies: Sequence[bytes], load: Load) -> list[Call]:
    """Send all requests. Returns their calls; of a closed loop in the order in which they ended."""
    if load.rate is None:
        return await _closed_loop(client, bodies, load.concurrency)
    draw, began_s, tasks = random.Random(load.seed), time.perf_counter(), []
    due = itertools.accumulate(draw.expovariate(load.rate) for _ in bodies)
    for body, after_s in zip(bodies, due, strict=True):
        await asyncio.sleep(began_s + after_s - time.perf_counter())
        tasks.append(asyncio.create_task(client.call(body, began_s + after_s)))
    return await asyncio.gather(*tasks)


async def _closed_loop(client: Client, bodies: Iterable[bytes], concurrency: int) -> list[Call]:
    waiting, calls = iter(bodies), []

    async def one_after_the_other() -> None:
        for body in waiting:
            calls.append(await client.call(body, time.perf_counter()))

    await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))
    return calls


async def _watch_the_loop(late_s: list[float]) -> None:
    while True:
        due_s = time.perf_counter() + _TICK_S
        await asyncio.sleep(_TICK_S)
        late_s.append(time.perf_counter() - due_s)


def _latencies(calls: Sequence[Call]) -> dict[str, list[float]]:
    """Seconds until the first token (ttft) and the last (e2e), from when a request was to be sent, and between tokens (itl)."""
    return {
        "ttft": [call.times[0] - call.due_s for call in calls],
        "itl": [after - before for call in calls for before, after in itertools.pairwise(call.times)],
        "e2e": [call.ended_s - call.due_s for call in calls],
    }


async def measure_load(client: Client, load: Load, *, model: str, vocab_size: int) -> Row:
    """Run one load and sum it up. Raises `EnginError` if every request failed."""
    bodies, late_s = load.bodies(model, vocab_size), [0.0]
    watching = asyncio.create_task(_watch_the_loop(late_s))
    busy_s, began_s = time.process_time(), time.perf_counter()
    calls = await run_load(client, bodies, load)
    total_s, busy_s = time.perf_counter() - began_s, time.process_time() - busy_s
    watching.cancel()
    good = [call for call in calls if call.error is None]
    errors = Counter(call.error for call in calls if call.error is not None)
    if not good:
        raise EnginError(f"all {len(calls)} requests failed, most often so: {errors.most_common(1)[0][0]}")
    num_tokens = sum(call.num_tokens for call in good)
    return Row(
        what={"model": model, "load": str(load), "requests": len(calls), **_lengths(load)},
        measured=percentiles(_latencies(good)) | {"total_s": total_s},
        derived={
            "output_tokens_per_s": num_tokens / total_s,
            "requests_per_s": len(good) / total_s,
            "errors": sum(errors.values()),
            "client_busy_fraction": busy_s / total_s,
            "client_late_p99_s": percentiles({"late": late_s})["late_p99_s"],
        },
        details={
            "errors": dict(errors),
            "prompt_tokens": sum(length for length, _ in load.lengths),
            "output_tokens": num_tokens,
            "pieces": sum(len(call.times) for call in good),
            "sent_late_max_s": max(call.sent_s - call.due_s for call in calls),
        },
    )


def _lengths(load: Load) -> dict[str, str]:
    """As they are asked for: one number, or from the least to the most."""
    bounds = {name: (min(of), max(of)) for name, of in zip(("input", "output"), zip(*load.lengths, strict=True), strict=True)}
    told = {name: str(least) if least == most else f"{least}:{most}" for name, (least, most) in bounds.items()}
    return told | ({"shared_prefix": str(load.shared_prefix)} if load.shared_prefix else {})
