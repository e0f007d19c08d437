"""A router that reads vLLM's KV events.

The subscriber is written from vLLM's schema (vllm/distributed/kv_events.py since vllm#42892), not from our code.
"""

from __future__ import annotations

import time

import msgspec
import zmq

from enginery.contracts.batch import STATE, WINDOW

PAGE_SIZE = 4
PATIENCE_MS = 20_000


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[object]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[object, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


Prefix = tuple[str, tuple[int, ...]]


class Router:
    """Subscribes, and keeps the blocks that an engine has: hash -> all tokens from the beginning to its end, and their salt."""

    def __init__(self, address: str, replay: str, topic: str = "", rank: int = 0) -> None:
        self.rank = rank
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.connect(address)
        self.events.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(replay)
        self.decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self.blocks: dict[int, Prefix] = {}
        self.topic = topic.encode()
        self.last = -1
        self.groups: dict[int, tuple[str, int | None]] = {}
        self.others: dict[int, set[int]] = {}  # of groups beside the first, the blocks that are there
        self.kinds: set[str] = set()
        self.salts: set[str] = set()

    def catch_up(self) -> None:
        """Ask for what was missed, from the first message on."""
        self.replay.send_multipart((b"", (self.last + 1).to_bytes(8, "big")))
        while True:
            assert self.replay.poll(PATIENCE_MS)
            _, number, batch = self.replay.recv_multipart()
            if not batch:
                assert int.from_bytes(number, "big", signed=True) == -1
                return
            self.take(number, batch)

    def listen(self, wait_ms: int = 0) -> None:
        while self.events.poll(wait_ms):
            topic, number, batch = self.events.recv_multipart()
            assert topic == self.topic
            if int.from_bytes(number, "big") > self.last + 1:
                self.catch_up()
            if int.from_bytes(number, "big") > self.last:
                self.take(number, batch)

    def take(self, number: bytes, batch: bytes) -> None:
        assert int.from_bytes(number, "big") == self.last + 1, "a gap"
        self.last += 1
        told = self.decode(batch)
        assert abs(told.ts - time.time()) < 600
        assert told.data_parallel_rank == self.rank
        for event in told.events:
            self.kinds.add(type(event).__name__)
            match event:
                case BlockStored(group_idx=int(group)) if group:
                    self.store_other(event)
                case BlockStored():
                    self.store(event)
                case BlockRemoved(group_idx=int(group)) if group:
                    assert self.others[group] >= set(event.block_hashes)
                    self.others[group] -= set(event.block_hashes)
                case BlockRemoved():
                    for removed in event.block_hashes:
                        del self.blocks[removed]
                case AllBlocksCleared():
                    self.blocks.clear()
                    self.others.clear()

    def store_other(self, event: BlockStored) -> None:
        """Of a window, or of states: blocks that the first group has too."""
        self.groups[event.group_idx] = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
        own, parent = self.others.setdefault(event.group_idx, set()), event.parent_block_hash
        salt, before = (event.extra_keys[0][0] if event.extra_keys else "", ()) if parent is None else self.blocks[parent]
        for place, name in enumerate(event.block_hashes):
            before += tuple(event.token_ids[place * PAGE_SIZE : (place + 1) * PAGE_SIZE])
            assert self.blocks[name] == (salt, before)
            assert name not in own
            own.add(name)

    def known_others(self) -> dict[str, set[Prefix]]:
        kinds = {group: STATE if kind == "mamba" else WINDOW for group, (kind, _) in self.groups.items()}
        return {kinds[group]: {self.blocks[name] for name in own} for group, own in self.others.items() if own}

    def goes_on_from(self, prompt: tuple[int, ...], salt: str) -> int:
        """How many tokens of a prompt are there in all groups, as vLLM's coordinator finds them."""
        names = {prefix: name for name, prefix in self.blocks.items()}
        path = list[int]()
        for stop in range(PAGE_SIZE, len(prompt), PAGE_SIZE):
            if (salt, prompt[:stop]) not in names:
                break
            path.append(names[salt, prompt[:stop]])
        return next((count for count in range(len(path), 0, -1) if self.has_others(path[:count])), 0) * PAGE_SIZE

    def has_others(self, path: list[int]) -> bool:
        for group, (kind, window) in self.groups.items():
            reach = 1 if kind == "mamba" else -(-(window - 1) // PAGE_SIZE)
            if not self.others.get(group, set()) >= set(path[-reach:]):
                return False
        return True

    def store(self, event: BlockStored) -> None:
        assert event.block_size == PAGE_SIZE
        assert event.medium == "CPU"
        assert len(event.token_ids) == PAGE_SIZE * len(event.block_hashes)
        salt = event.extra_keys[0][0] if event.extra_keys else ""
        salt, before = (salt, ()) if event.parent_block_hash is None else self.blocks[event.parent_block_hash]
        self.salts.add(salt)
        for place, name in enumerate(event.block_hashes):
            before += tuple(event.token_ids[place * PAGE_SIZE : (place + 1) * PAGE_SIZE])
            assert name not in self.blocks
            self.blocks[name] = (salt, before)

    def close(self) -> None:
        self.context.destroy(linger=0)
