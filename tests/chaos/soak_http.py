"""Mixed load over HTTP for a while, a part of it cut off; then memory, descriptors and threads must be what they were.

PYTHONPATH=tests python tests/chaos/soak_http.py --seconds 1200 > docs/benchmarks/http-soak.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import psutil
from chaos.harness import Server, started

CLIENTS = 8
CUT = 0.05  # share of the streams that are left
MOST_GROWN_BYTES = 32 << 20  # of both processes, once torch has seen every shape of a batch: that takes some minutes
MOST_GROWN_EARLY_BYTES = 256 << 20


@dataclass(frozen=True)
class Sample:
    """What both processes hold."""

    at_s: float
    memory_bytes: int
    front_bytes: int
    descriptors: int
    threads: int


@dataclass
class Soak:
    """Drives one server."""

    server: Server
    counts: Counter[str] = field(default_factory=Counter)
    first_s: list[tuple[float, float]] = field(default_factory=list)  # when, and the time to the first part of an answer
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.processes = [psutil.Process(self.server.process.pid), psutil.Process(self.server.engine_pid)]
        self.began_s = time.monotonic()

    def look(self) -> None:
        """Take a sample."""
        self.samples.append(
            Sample(
                at_s=time.monotonic() - self.began_s,
                memory_bytes=sum(process.memory_info().rss for process in self.processes),
                front_bytes=self.processes[0].memory_info().rss,
                descriptors=sum(process.num_fds() for process in self.processes),
                threads=sum(process.num_threads() for process in self.processes),
            )
        )

    async def client(self, number: int, until_s: float) -> None:
        """One request after the other: whole and streamed, good and bad, read to the end and left."""
        chance = random.Random(number)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=120) as http:
            while time.monotonic() < until_s:
                kind = chance.choices(["stream", "whole", "bad", "chat"], [6, 2, 1, 1])[0]
                body = self._body(kind, chance)
                path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
                if kind == "stream":
                    await self._stream(http, body, leave_at=chance.randint(1, 20) if chance.random() < CUT else None)
                else:
                    answer = await http.post(path, json=body)
                    assert answer.status_code == (400 if kind == "bad" else 200), answer.text
                self.counts[kind] += 1

    def _body(self, kind: str, chance: random.Random) -> dict[str, object]:
        body: dict[str, object] = {"max_tokens": chance.randint(1, 60), "temperature": chance.choice([0, 0.8]), "ignore_eos": True}
        if kind == "chat":
            return body | {"messages": [{"role": "user", "content": "a" * chance.randint(1, 50)}]}
        prompt = [5 + chance.randrange(250) for _ in range(chance.randint(1, 150))]
        return body | {"prompt": prompt, "stream": kind == "stream"} | ({"top_p": 7} if kind == "bad" else {})

    async def _stream(self, http: httpx.AsyncClient, body: dict[str, object], *, leave_at: int | None) -> None:
        began, count = time.monotonic(), 0
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for _ in response.aiter_lines():
                if count == 0:
                    self.first_s.append((began - self.began_s, time.monotonic() - began))
                count += 1
                if leave_at is not None and count >= leave_at:
                    self.counts["left"] += 1
                    return

    async def load(self, seconds: float) -> None:
        """All clients together, with a look from time to time."""
        until_s = time.monotonic() + seconds
        clients = asyncio.gather(*(self.client(number, until_s) for number in range(CLIENTS)))
        while not clients.done():
            await asyncio.wait((clients,), timeout=min(seconds / 40, 10))
            self.look()
        await clients


def soak(seconds: float) -> dict[str, object]:
    """Raises AssertionError if something grows, is lost, or answered otherwise. A quarter of the time is for warming up."""
    with started(step_s=0) as server:
        run = Soak(server)
        asyncio.run(run.load(seconds / 4))
        server.assert_healthy()
        run.look()
        warm, num_warm = run.samples[-1], len(run.samples)
        asyncio.run(run.load(seconds * 3 / 4))
        server.assert_healthy()
        run.look()
        after, late = run.samples[-1], run.samples[num_warm:]
        grown = after.memory_bytes - warm.memory_bytes
        slope = statistics.linear_regression([sample.at_s for sample in late], [sample.memory_bytes for sample in late]).slope
        most = MOST_GROWN_BYTES if seconds >= 600 else MOST_GROWN_EARLY_BYTES
        assert grown < most, f"{grown:,} bytes more than after warming up"
        assert after.front_bytes - warm.front_bytes < MOST_GROWN_BYTES / 4, (warm, after)
        assert after.descriptors <= warm.descriptors + 4, (warm, after)
        assert after.threads <= warm.threads + 2, (warm, after)
        half = late[len(late) // 2].at_s
        parts = [
            [took for at, took in run.first_s if warm.at_s < at <= half],
            [took for at, took in run.first_s if at > half],
        ]
        return {
            "seconds": seconds,
            **run.counts,
            "clients": CLIENTS,
            "memory_bytes_warm": warm.memory_bytes,
            "memory_bytes_after": after.memory_bytes,
            "front_bytes": [warm.front_bytes, after.front_bytes],
            "memory_bytes_per_hour": round(slope * 3600),
            "descriptors": [warm.descriptors, after.descriptors],
            "threads": [warm.threads, after.threads],
            "first_part_p99_s_by_half": [
                round(statistics.quantiles(part, n=100)[-1], 3) if len(part) > 1 else None for part in parts
            ],
            "control_request_is_answered_as_before": True,
            "free_and_cached_pages_are_all": True,
        }


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1200)
    asked = parser.parse_args()
    result = soak(asked.seconds)
    json.dump(result | {"command": "tests/chaos/soak_http.py " + " ".join(sys.argv[1:])}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
