"""Publishes which prefixes are cached: a thread makes the messages and sends them, so that a step waits for nobody.

    step ── changes, by page ──> queue, bounded ──> thread: hashes, numbers ──> PUB      topic | number, 8 bytes | batch
                                                          └── the last batches ──> ROUTER   number? -> number | batch, .. -1 | empty

A page of the tree holds one block, so hashes are kept by page.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import zmq

from enginery.config.schema import EngineOptions
from enginery.engine.kv_events.schema import END_OF_REPLAY, AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from enginery.errors import ConfigError
from enginery.kv.prefix import TOKEN_TYPECODE

MOST_WAITING: Final = 10_000  # steps
MOST_KEPT: Final = 10_000  # batches, for replay
_SOCKET_MESSAGES: Final = 100_000  # that wait for one subscriber; it is not sent more
_LOOK_S: Final = 0.05
_END_S: Final = 1.0
_log: Final = logging.getLogger(__name__)


class Stored(NamedTuple):
    """Pages that joined the tree behind page `parent`; None: at its root. tokens: as the tree has them."""

    parent: int | None
    tokens: bytes
    pages: tuple[int, ...]
    salt: str


class Removed(NamedTuple):
    """Pages that left it."""

    pages: tuple[int, ...]


class Cleared(NamedTuple):
    """All pages have left it, or nobody knows which."""


Change = Stored | Removed | Cleared


class KVEvents:
    """Implements `PrefixEvents`, and `kv.prefix.PrefixWatcher`. Used by the engine's thread."""

    def __init__(self, asked: EngineOptions, *, medium: str, most_waiting: int = MOST_WAITING) -> None:
        """medium: as vLLM names where the pages are. Raises `ConfigError` for an address that cannot be used."""
        self._changes: list[Change] = [Cleared()]  # for subscribers of the engine that was here before
        self._waiting: queue.Queue[tuple[float, list[Change]] | None] = queue.Queue(most_waiting)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        events = self._context.socket(zmq.PUB)
        events.set_hwm(_SOCKET_MESSAGES)
        replay = self._context.socket(zmq.ROUTER)
        events.linger = replay.linger = int(1000 * _END_S)
        try:
            _open(events, address_of(asked.kv_events or "", asked.dp_rank))
            if asked.kv_events_replay is not None:
                replay.bind(address_of(asked.kv_events_replay, asked.dp_rank))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            addresses = " and ".join(address_of(each, asked.dp_rank) for each in (asked.kv_events, asked.kv_events_replay) if each)
            raise ConfigError(f"KV events cannot be published at {addresses}: {error}; name another port or path") from error
        publisher = _Publisher(events, replay, asked, medium=medium)
        self._thread = threading.Thread(target=publisher.run, args=(self._waiting,), name="kv-events", daemon=True)
        self._thread.start()

    @property
    def watcher(self) -> KVEvents:
        """What the cache is to tell."""
        return self

    def stored(self, parent: int | None, tokens: bytes, pages: Sequence[int], salt: str) -> None:
        self._changes.append(Stored(parent, tokens, tuple(pages), salt))

    def removed(self, pages: Sequence[int]) -> None:
        self._changes.append(Removed(tuple(pages)))

    def cleared(self) -> None:
        """Nothing is cached any more."""
        self._changes = [Cleared()]

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
            self._waiting.put_nowait((time.time(), [Cleared()]))  # nobody else puts anything in

    def close(self) -> None:
        """Publish what waits, for a second at the most."""
        if self._thread.is_alive():
            _empty(self._waiting, but=self._waiting.maxsize - 1)
            self._waiting.put_nowait(None)
            self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._context.term()


class _Publisher:
    """Of the thread: what is cached by page, and the last batches."""

    def __init__(self, events: zmq.Socket[bytes], replay: zmq.Socket[bytes], asked: EngineOptions, *, medium: str) -> None:
        self._events, self._replay, self._topic = events, replay, asked.kv_events_topic.encode()
        self._page_size, self._medium, self._rank = asked.page_size, medium, asked.dp_rank
        self._hashes: dict[int, int] = {}
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=MOST_KEPT)
        self._next = 0

    def run(self, waiting: queue.Queue[tuple[float, list[Change]] | None]) -> None:
        """Until None comes; then close the sockets."""
        with self._events, self._replay:
            while (taken := self._take(waiting)) is not None:
                self._publish(*taken)

    def _take(self, waiting: queue.Queue[tuple[float, list[Change]] | None]) -> tuple[float, list[Change]] | None:
        """The next that waits. Until there is one, subscribers are answered."""
        while True:
            while self._replay.poll(0):
                self._answer(self._replay.recv_multipart())
            with contextlib.suppress(queue.Empty):
                return waiting.get(timeout=_LOOK_S)

    def _publish(self, at_s: float, changes: Sequence[Change]) -> None:
        if events := [event for change in changes if (event := self._event(change)) is not None]:
            batch = msgspec.msgpack.encode(KVEventBatch(ts=at_s, events=events, data_parallel_rank=self._rank))
            number = self._next.to_bytes(8, "big")
            self._events.send_multipart((self._topic, number, batch))
            self._kept.append((number, batch))
            self._next += 1

    def _event(self, change: Change) -> BlockStored | BlockRemoved | AllBlocksCleared | None:
        """None where nothing is known of what it follows: that was dropped with too much else."""
        match change:
            case Stored():
                return self._stored(change)
            case Removed(pages):
                hashes = [self._hashes.pop(page) for page in reversed(pages) if page in self._hashes]
                return BlockRemoved(block_hashes=hashes, medium=self._medium) if hashes else None
            case Cleared():
                self._hashes.clear()
                return AllBlocksCleared()

    def _stored(self, change: Stored) -> BlockStored | None:
        parent = None if change.parent is None else self._hashes.get(change.parent)
        if parent is None and change.parent is not None:
            return None
        made, before, size = list[int](), parent, len(change.tokens) // len(change.pages)
        for place, page in enumerate(change.pages):
            before = _hash(before, change.tokens[place * size : (place + 1) * size], change.salt)
            made.append(before)
            self._hashes[page] = before
        salts: list[list[str] | None] | None = None
        if change.salt and parent is None:  # as vLLM has it, on the first block: the others follow it
            salts = [[change.salt], *[None] * (len(made) - 1)]
        return BlockStored(
            block_hashes=made,
            parent_block_hash=parent,
            token_ids=array(TOKEN_TYPECODE, change.tokens).tolist(),
            block_size=self._page_size,
            lora_id=None,
            lora_name=None,
            medium=self._medium,
            extra_keys=salts,
        )

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


def _hash(before: int | None, tokens: bytes, salt: str) -> int:
    """Of a block behind others: the same in every process, for the same tokens from the beginning on and the same salt."""
    begin = salt.encode() if before is None else before.to_bytes(8, "big")
    return int.from_bytes(
        hashlib.blake2b(tokens, digest_size=8, key=hashlib.blake2b(begin, digest_size=8).digest()).digest(), "big"
    )


def address_of(address: str, rank: int) -> str:
    """Of a replica, as vLLM has it: the port so much higher; a path with the number at its end. Raises `ConfigError`."""
    if rank == 0:
        return address
    head, _, port = address.rpartition(":")
    if not address.startswith("tcp://"):
        return f"{address}_dp{rank}"
    if not port.isdecimal():
        raise ConfigError(f"{address} has no port that replica {rank} could count from; write tcp://*:5557")
    return f"{head}:{int(port) + rank}"


def _open(events: zmq.Socket[bytes], address: str) -> None:
    """Bind where the address is of this host alone, as vLLM does; else connect, to a subscriber that has bound."""
    if any(sign in address for sign in ("*", "::", "0.0.0.0")) or address.startswith("ipc://"):
        events.bind(address)
    else:
        events.connect(address)


def _empty(waiting: queue.Queue[tuple[float, list[Change]] | None], but: int = 0) -> None:
    """Take out all but so many."""
    while waiting.qsize() > but:
        try:
            waiting.get_nowait()
        except queue.Empty:
            return
