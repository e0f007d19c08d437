"""The messages between the HTTP server and the engine's process: msgpack frames of tagged structs over ZeroMQ, never pickle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from enginery.config.schema import EngineOptions, HostShare
from enginery.contracts.engine import BuildProgress, EngineFacts, EngineStats
from enginery.contracts.request import GenerationRequest, RequestOutput
from enginery.plugin.manifest import Manifest


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """The first and only frame on the child's stdin, which then stays open as long as the parent lives. log_level: of its log.

    share: of the host, where it is not the only engine there.
    """

    endpoint: str
    options: EngineOptions
    manifest: Manifest
    log_level: str = "INFO"
    share: HostShare | None = None


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Run requests that have the same prompt, which they lack. Each is answered with `Queued` or `Rejected`, then has outputs."""

    prompt_token_ids: tuple[int, ...]
    requests: list[GenerationRequest]

    @classmethod
    def of(cls, requests: Sequence[GenerationRequest]) -> Submit:
        """The message for requests of one prompt."""
        return cls(requests[0].prompt_token_ids, [dataclasses.replace(request, prompt_token_ids=()) for request in requests])

    def whole(self) -> list[GenerationRequest]:
        """The requests with their prompt, which is in memory once."""
        return [dataclasses.replace(request, prompt_token_ids=self.prompt_token_ids) for request in self.requests]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request; it has no more outputs. One that is not known is ignored."""

    request_id: str


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """Free the prefix cache. It is answered with `Done`."""


class Profile(msgspec.Struct, frozen=True, tag="profile"):
    """Trace the next steps. It is answered with `Done`."""

    num_steps: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the loop and the process."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """How far the start is. Sent again whenever that changes, until `Ready` or `Failed`."""

    progress: BuildProgress


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine can take requests. manifest_digest: of the plugins that it loaded."""

    facts: EngineFacts
    manifest_digest: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine could not start, or broke. The process ends. is_ours: an `EnginError`, to be shown without a traceback."""

    message: str
    exit_code: int
    is_ours: bool


class Queued(msgspec.Struct, frozen=True, tag="queued"):
    """The request is in the queue, and outputs will follow."""

    request_id: str


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag="rejected"):
    """The request can never be served, or (is_queue_full, is_overload) not now, or (is_fault) a plugin failed over it."""

    request_id: str
    message: str
    param: str | None
    is_queue_full: bool = False
    is_overload: bool = False
    is_fault: bool = False


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All outputs of one step."""

    outputs: list[RequestOutput]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent several times a second: the engine's loop runs, and these are its counters. prepares: from now on, however long."""

    stats: EngineStats
    prepares: bool = False


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The answer to a `Flush` or a `Profile`, in their order. told: what came of it, for people."""

    told: str


ToEngine = Submit | Abort | Stop | Flush | Profile
FromEngine = Loading | Ready | Failed | Queued | Rejected | Outputs | Heartbeat | Done

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
