"""The first steps of an engine in a file, so that they can be run again: each step as a value, and the tokens that it sampled.

A file is a row of frames, each the length of what follows in 8 bytes, little-endian, and msgpack: first a `Head`, then a
`RecordedStep` for each step from the start on, when memory was empty.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from enginery.config.schema import EngineOptions
from enginery.contracts.engine import EngineFacts
from enginery.contracts.step import STORED_VERSION, StepInput, StepOutput
from enginery.errors import ConfigError
from enginery.schedule.one_lane import as_one_lane
from enginery.schedule.request import Request
from enginery.worker.paths.running_step import Guesses

_LENGTH_BYTES: Final = 8
_log: Final = logging.getLogger(__name__)


class _Version(msgspec.Struct):
    version: int


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What the steps were recorded of. options: as they were asked for. max_batch_requests: the number of seats."""

    version: int
    options: EngineOptions
    facts: EngineFacts
    max_batch_requests: int
    max_batch_tokens: int


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step, whose requests its items are of, and the tokens that it told of each; -1 where that failed.

    guesses: what a draft model left on the device to follow each item that samples; empty where later steps have it.
    """

    step: StepInput
    request_ids: list[str]
    token_ids: list[tuple[int, ...]]
    guesses: list[tuple[int, ...]] = []


class Recording(NamedTuple):
    """A file of steps, read. steps: those of several lanes as of one."""

    head: Head
    steps: Sequence[RecordedStep]


class StepRecorder:
    """Writes the first `num_steps` steps. Raises `ConfigError` if the file cannot be made."""

    def __init__(self, path: Path, num_steps: int, head: Head) -> None:
        self._path = path
        self._missing = num_steps
        self._next_number = 0
        try:
            path.write_bytes(_frame(head))
        except OSError as error:
            raise ConfigError(f"steps cannot be recorded to {path}: {error.strerror}") from error

    def add(self, step: StepInput, requests: Sequence[Request], output: StepOutput, guesses: Guesses | None) -> None:
        """A step whose tokens have come; its guesses are waited for.

        After one that was given up nothing is recorded: what follows depends on it.
        """
        if not self._missing:
            return
        if step.number != self._next_number:
            _log.warning("step %d failed, so recording ends before it; %s has the steps until then", self._next_number, self._path)
            self._missing = 0
            return
        recorded = RecordedStep(
            step=step,
            request_ids=[request.request_id for request in requests],
            token_ids=output.token_ids,
            guesses=[] if guesses is None or guesses.ready is None else [guesses.of(place) for place in range(len(guesses.tokens))],
        )
        try:
            with self._path.open("ab") as file:
                file.write(_frame(recorded))
        except OSError as error:
            _log.warning("recording ends before step %d: %s cannot be written: %s", step.number, self._path, error.strerror)
            self._missing = 0
            return
        self._next_number += 1
        self._missing -= 1
        if not self._missing:
            _log.warning("%d steps are recorded in %s; engine replay runs them again", self._next_number, self._path)


def read_recording(path: Path) -> Recording:
    """The steps of a file; one that was cut off at its end is left out. Raises `ConfigError` for any other file or version."""
    try:
        frames = list(_frames(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        if not frames:
            raise ConfigError(f"{path} has no recorded steps; engine serve --record-steps makes such a file")
        version = msgspec.msgpack.decode(frames[0], type=_Version).version
        if version != STORED_VERSION:
            raise ConfigError(
                f"{path} holds steps of version {version}, and this engine reads version {STORED_VERSION}; "
                "replay it with the engine that recorded it, or record it again"
            )
        head = msgspec.msgpack.decode(frames[0], type=Head)
        steps = [msgspec.msgpack.decode(frame, type=RecordedStep) for frame in frames[1:]]
        of_one = as_one_lane([recorded.step for recorded in steps])
        return Recording(head, [msgspec.structs.replace(each, step=step) for each, step in zip(steps, of_one, strict=True)])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no file of recorded steps: {error}") from error


def _frame(value: msgspec.Struct) -> bytes:
    packed = msgspec.msgpack.encode(value)
    return len(packed).to_bytes(_LENGTH_BYTES, "little") + packed


def _frames(content: bytes) -> Iterator[bytes]:
    """What `_frame` packed, one after the other; a last one that was cut off is left out."""
    at = 0
    while at + _LENGTH_BYTES <= len(content):
        begin = at + _LENGTH_BYTES
        at = begin + int.from_bytes(content[at:begin], "little")
        if at <= len(content):
            yield content[begin:at]


def recorder_of(asked: EngineOptions, facts: EngineFacts, *, max_batch_requests: int, max_batch_tokens: int) -> StepRecorder | None:
    """What `record_steps` asks for. None: nothing."""
    if asked.record_steps is None:
        return None
    num_steps, file = asked.record_steps
    if num_steps < 1:
        raise ConfigError(f"record_steps is {num_steps}, but must be 1 or more")
    head = Head(
        version=STORED_VERSION, options=asked, facts=facts, max_batch_requests=max_batch_requests, max_batch_tokens=max_batch_tokens
    )
    return StepRecorder(Path(file), num_steps, head)
