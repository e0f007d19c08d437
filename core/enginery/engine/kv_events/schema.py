"""The messages of KV events as vLLM publishes them, so that routers made for it read ours.

The format is that of `vllm.distributed.kv_events` since vllm#42892 (May 2026): a batch is a msgpack array, its events are maps with
their kind under "type"; before, these were arrays too. Fields without a default are always there, as in vLLM. Hashes of blocks are
64-bit numbers: how they are made is the publisher's choice, subscribers compare them alone.
"""

from __future__ import annotations

from typing import Final

import msgspec

END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)


class _Event(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True, tag=True):
    """Its kind is the name of its class."""


class BlockStored(_Event, frozen=True, kw_only=True):
    """Blocks that follow each other, and the one before them. token_ids: of all of them. extra_keys: of each block, its salt.

    lora_id, lora_name: there are none here. medium: where they are, GPU or CPU. group_idx and what follows: of a model with several
    kinds of memory, of which, as vLLM calls them: full_attention or mla_attention, sliding_window, mamba for states of any rule.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(_Event, frozen=True, kw_only=True):
    """Blocks that are no longer cached, in the memory of that group."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(_Event, frozen=True, kw_only=True):
    """Nothing is cached any more, or what is was lost count of."""


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What one step changed. ts: seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int
