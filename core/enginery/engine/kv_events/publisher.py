"""Publishes which prefixes are cached: a thread makes the messages and sends them, so that a step waits for nobody.

step ── changes, by page ──> queue, bounded ──> thread: hashes, numbers ──> PUB      topic | number, 8 bytes | batch
                                                      └── the last batches ──> ROUTER   number? -> number | batch, .. -1 | empty
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

import msgspec
import zmq

from enginery.config.schema import EngineOptions
from enginery.contracts.batch import MemoryKind
from enginery.engine.kv_events.blocks import Blocks, Event, Group
from enginery.engine.kv_events.schema import END_OF_REPLAY, KVEventBatch
from enginery.errors import ConfigError
from enginery.kv.prefix import TOKEN_BYTES
from enginery.kv.resume import ResumePoint

MOST_WAITING: Final = 10_000  # steps
MOST_KEPT: Final = 10_000  # batches, for replay
_SOCKET_MESSAGES: Final = 100_000  # that wait for one subscriber; it is not sent more
_LOOK_S: Final = 0.05
_END_S: Final = 1.0
_log: Final = logging.getLogger(__name__)
Change = Callable[[Blocks], Iterator[Event]]
_Waiting: TypeAlias = "queue.Queue[tuple[float, list[Change]] | None]"  # when, and what; None: nothing more


class KVEvents:
    """Of one lane, as in vLLM of an engine with a number and ports. Implements `PrefixWatcher`. Used by the engine's thread."""

    def __init__(
        self,
        asked: EngineOptions,
        *,
        lane: int = 0,
        medium: str,
        groups: Mapping[MemoryKind, Group],
        most_waiting: int = MOST_WAITING,
    ) -> None:
        """medium: as vLLM names where the pages are. Raises `ConfigError` for an address that cannot be used."""
        rank = asked.dp_rank * asked.dp_attention + lane
        address, replayed = (address_of(each, rank) if each else "" for each in (asked.kv_events, asked.kv_events_replay))
        self._page_bytes = asked.page_size * TOKEN_BYTES
        self._numbers, self._points = itertools.count(), dict[ResumePoint, int]()
        self._changes: list[Change] = []
        self._waiting: _Waiting = queue.Queue(most_waiting)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        events, replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        events.set_hwm(_SOCKET_MESSAGES)
        replay.set_hwm(MOST_KEPT + 1)  # a whole answer, as what is more would be dropped without a word
        events.linger = replay.linger = int(1000 * _END_S)
        try:
            (events.bind if binds(address) else events.connect)(address)
            if replayed:
                replay.bind(replayed)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            addresses = " and ".join(filter(None, (address, replayed)))
            raise ConfigError(f"KV events cannot be published at {addresses}: {error}; name another port or path") from error
        blocks = Blocks(groups, page_size=asked.page_size, medium=medium)
        publisher = _Publisher(events, replay, blocks, topic=asked.kv_events_topic.encode(), rank=rank)
        self._thread = threading.Thread(target=publisher.run, args=(self._waiting,), name="kv-events", daemon=True)
        self._thread.start()

    def stored(self, parent: int | None, tokens: bytes, pages: Sequence[int], salt: str) -> None:
        self._changes.append(partial(Blocks.stored, parent=parent, tokens=tokens, pages=tuple(pages), salt=salt))

    def removed(self, pages: Sequence[int]) -> None:
        self._changes.append(partial(Blocks.removed, pages=tuple(pages)))

    def resumable(self, point: ResumePoint, tokens: bytes, pages: Sequence[int], salt: str) -> None:
        counts = {kind: len(own) for kind, own in point.pages.items()}
        first = max(0, len(pages) - max(counts.values()) - 1)
        number = self._points[point] = next(self._numbers)
        some, places = tokens[first * self._page_bytes :], tuple(pages[first:])
        self._changes.append(partial(Blocks.resumable, number=number, counts=counts, tokens=some, pages=places, salt=salt))

    def given_up(self, point: ResumePoint) -> None:
        if (number := self._points.pop(point, None)) is not None:
            self._changes.append(partial(Blocks.given_up, number=number))

    def cleared(self) -> None:
        self._changes = [Blocks.cleared]
        self._points.clear()

    def publish(self) -> None:
        """Hand over what has changed since the last call. Waits for nobody."""
        if not self._changes:
            return
        changes, self._changes = self._changes, []
        try:
            self._waiting.put_nowait((time.time(), changes))
        except queue.Full:
            _log.warning(
                "%d steps of KV events wait to be published; they are dropped, and all blocks told as cleared",
                self._waiting.maxsize,
            )
            _empty(self._waiting)
            self._waiting.put_nowait((time.time(), [Blocks.cleared]))  # nobody else puts anything in

    def close(self) -> None:
        """Publish what waits, for a second at the most."""
        if self._thread.is_alive():
            _empty(self._waiting, but=self._waiting.maxsize - 1)
            self._waiting.put_nowait(None)
            self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._context.term()


class _Publisher:
    """Of the thread: the sockets, and the last batches."""

    def __init__(self, events: zmq.Socket[bytes], replay: zmq.Socket[bytes], blocks: Blocks, *, topic: bytes, rank: int) -> None:
        self._events, self._replay, self._blocks, self._topic, self._rank = events, replay, blocks, topic, rank
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=MOST_KEPT)
        self._next = 0

    def run(self, waiting: _Waiting) -> None:
        """Publish what waits and answer subscribers, until None comes; then close the sockets."""
        with self._events, self._replay:
            while True:
                while self._replay.poll(0):
                    self._answer(self._replay.recv_multipart())
                try:
                    taken = waiting.get(timeout=_LOOK_S)
                except queue.Empty:
                    continue
                if taken is None:
                    return
                at_s, changes = taken
                changes = changes if self._next else [Blocks.cleared, *changes]  # who knew an engine before it listens again by now
                if events := [event for change in changes for event in change(self._blocks)]:
                    batch = msgspec.msgpack.encode(KVEventBatch(ts=at_s, events=events, data_parallel_rank=self._rank))
                    number = self._next.to_bytes(8, "big")
                    self._events.send_multipart((self._topic, number, batch))
                    self._kept.append((number, batch))
                    self._next += 1

    def _answer(self, frames: list[bytes]) -> None:
        """To a request [who, empty, number]: what is kept from this number on, a message each, and the end."""
        if len(frames) != 3 or len(frames[2]) != 8:
            _log.warning("a malformed request to replay KV events was dropped: %d frames", len(frames))
            return
        who, _, first = frames
        for number, batch in self._kept:
            if number >= first:
                self._replay.send_multipart((who, b"", number, batch))
        self._replay.send_multipart((who, b"", END_OF_REPLAY, b""))


def address_of(address: str, rank: int) -> str:
    """Of a replica or a lane, as vLLM has it: the port so much higher; a path with the number at its end. Raises `ConfigError`."""
    if not address.startswith("tcp://"):
        return f"{address}_dp{rank}" if rank else address
    head, _, port = address.rpartition(":")
    if rank and not (port.isdecimal() and int(port)):
        raise ConfigError(f"{address} has no port that number {rank} could count from; write tcp://*:5557")
    if port.isdecimal() and int(port) + rank > 65_535:  # of which ZeroMQ would listen at another
        raise ConfigError(f"KV events cannot be published at port {int(port) + rank}: 65535 is the last; name a lower one")
    return f"{head}:{int(port) + rank}" if rank else address


def binds(address: str) -> bool:
    """Whether events are published at this host's own address, as in vLLM; else a subscriber has bound, and is connected to."""
    return any(sign in address for sign in ("*", "::", "0.0.0.0")) or address.startswith("ipc://")


def _empty(waiting: _Waiting, but: int = 0) -> None:
    with contextlib.suppress(queue.Empty):
        while waiting.qsize() > but:
            waiting.get_nowait()
