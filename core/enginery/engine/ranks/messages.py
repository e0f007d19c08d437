"""The messages between the rank that schedules and the others: msgpack over ZeroMQ, never pickle.

To a rank go packed steps (`contracts.step.pack`), and an empty frame when it shall end.
"""

from __future__ import annotations

from typing import Final

import msgspec

from enginery.config.schema import EngineOptions
from enginery.contracts.parallel import ParallelFacts
from enginery.plugin.manifest import Manifest

END: Final = b""


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is to build: a frame on its stdin. steps, reports: addresses of sockets. meeting: file through which ranks meet.

    beat_s: how often it tells that it lives.
    """

    parallel: ParallelFacts
    options: EngineOptions
    manifest: Manifest
    steps: str
    reports: str
    meeting: str
    beat_s: float
    log_level: str


class Here(msgspec.Struct, frozen=True, tag="here"):
    """The rank has chosen its parts, and goes to meet the others."""

    rank: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The rank is built, and waits for steps."""

    rank: int


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag="alive"):
    """Sent several times a second from a thread of its own. See `Standing`. worked_s: what its processors have worked for it."""

    rank: int
    number: int
    phase: str
    waits: str
    worked_s: float


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The rank broke, and its process ends. is_ours: an `EnginError`. is_lost: only because another rank is gone."""

    rank: int
    message: str
    exit_code: int
    is_ours: bool
    is_lost: bool


FromRank = Here | Ready | Alive | Failed

encode = msgspec.msgpack.Encoder().encode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
