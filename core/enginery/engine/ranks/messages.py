"""The messages between the rank that schedules and the others: msgpack over ZeroMQ, never pickle.

To a rank go packed steps (`contracts.step.pack`), and an empty frame when it shall end.
"""

from __future__ import annotations

from typing import Final

import msgspec

from enginery.config.schema import EngineOptions
from enginery.contracts.parallel import Death, ParallelFacts
from enginery.plugin.manifest import Manifest

END: Final = b""


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is to build: a frame on its stdin. steps, reports: addresses of sockets, with `key` where it is not empty.

    meeting: file or address through which ranks meet; host: address of the first rank, towards which tensors are exchanged.
    beat_s: how often it tells that it lives.
    """

    parallel: ParallelFacts
    options: EngineOptions
    manifest: Manifest
    steps: str
    reports: str
    key: str
    meeting: str
    host: str
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


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """An `engine rank` wants to be a rank. rank: the number that it is to have; None: any. version: of enginery."""

    rank: int | None
    version: str
    host: str
    pid: int


class Gone(msgspec.Struct, frozen=True, kw_only=True, tag="gone"):
    """The process of an `engine rank` has ended."""

    death: Death


class BootFrame(msgspec.Struct, frozen=True, kw_only=True, tag="boot"):
    """For the stdin of an `engine rank`'s process: a packed `Boot`."""

    rank: int
    frame: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Why an `engine rank` cannot join."""

    why: str


class StillHere(msgspec.Struct, frozen=True, tag="still-here"):
    """Sent twice a second: whether it can be tells who is gone. silent_s: who hears nothing for so long has lost the engine."""

    silent_s: float


class Stacks(msgspec.Struct, frozen=True, tag="stacks"):
    """Write the stacks of all threads to stderr."""


class Over(msgspec.Struct, frozen=True, kw_only=True, tag="over"):
    """The engine has ended. grace_s: how long the process may take to end by itself."""

    grace_s: float


FromRank = Here | Ready | Alive | Failed
FromJoined = Join | Gone
ToJoined = BootFrame | Refused | StillHere | Stacks | Over

encode = msgspec.msgpack.Encoder().encode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
decode_from_joined = msgspec.msgpack.Decoder(FromJoined).decode
decode_to_joined = msgspec.msgpack.Decoder(ToJoined).decode
