"""`engine rank --join`: one rank of an engine on another host, under any launcher (torchrun, Slurm, Kubernetes, a shell).

    on one host       engine rank --new-key ranks.key             and a copy of the file to the others
    on the first      engine serve --tp 2 --executor join --listen tcp://10.0.0.1:5550 --rank-key-file ranks.key
    on each other     engine rank --join tcp://10.0.0.1:5550 --rank-key-file ranks.key

This process keeps the connection to the engine. The rank itself is a child of it, the same as one that the engine starts on its
own host: it is given its boot frame on stdin, its stacks are asked for by a signal, and how it ended is told. It ends with this
process, and this process when the connection is lost, so no rank outlives its engine. Imports no torch: it joins within a second.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from enginery import __version__
from enginery.config.schema import EngineOptions
from enginery.contracts.parallel import Death
from enginery.engine.ranks import messages
from enginery.engine.ranks.keys import RankKey
from enginery.engine.ranks.local import COMMAND, LocalRanks
from enginery.errors import CheckpointError, ConfigError, EngineDied

_REFUSED: Final = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED
_LOOK_MS: Final = 50
_LAST_WORDS_MS: Final = 2000


def join(address: str, key: RankKey, own: Mapping[str, object], *, rank: int | None, wait_s: float) -> int:
    """Be a rank of the engine there, to its end. Returns the exit code.

    own: what this rank has otherwise than its engine, of `EngineOptions`; None: the same, and all threads of the host. rank: its
    number, from 1; None: any. wait_s: how long the engine may take to listen. Raises `ConfigError` where it refuses this rank, and
    `EngineDied` when the engine is gone.
    """
    host_and_port(address, f"--join is {address!r}, but must be tcp://ADDRESS:PORT, as the engine's --listen")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = context.socket(zmq.DEALER)
    link.set_hwm(0)
    key.secure_rank(link)
    member = _Member(link, address, own, wait_s=wait_s)
    try:
        try:
            link.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"--join is {address!r}: {error}; it must be tcp://ADDRESS:PORT, as the engine's --listen") from error
        said = messages.Join(rank=rank, version=__version__, host=socket.gethostname(), pid=os.getpid())
        link.send(messages.encode(said))
        return member.run()
    finally:
        member.end()
        context.destroy(linger=_LAST_WORDS_MS if member.is_connected else 0)


class _Member:
    def __init__(self, link: zmq.Socket[bytes], address: str, own: Mapping[str, object], *, wait_s: float) -> None:
        self._link, self._address, self._own = link, address, own
        self._monitor = link.get_monitor_socket(_EVENTS)
        self._ranks: LocalRanks | None = None
        self._silent_s, self._is_alone = wait_s, True
        self.is_connected = False

    def run(self) -> int:
        heard_s = time.monotonic()
        while True:
            self._look_at_connection()
            if self._link.poll(_LOOK_MS):
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > self._silent_s:
                why = "no engine has listened" if self._is_alone else "the engine has said nothing"
                raise EngineDied(f"{why} at {self._address} for {self._silent_s:g} s; this rank ends")
            while self._link.poll(0):
                message = messages.decode_to_joined(self._link.recv())
                if isinstance(message, messages.Over):
                    if self._ranks is not None:
                        self._ranks.end(grace_s=message.grace_s)
                    self._tell(Death(0, 0, "ended with the engine", ()))
                    return 0
                self._take(message)
            for death in [] if self._ranks is None else self._ranks.poll():
                self._tell(death)
                print(f"rank {death.rank} {death.how}", file=sys.stderr, flush=True)
                return death.exit_code

    def end(self) -> None:
        if self._ranks is not None:
            self._ranks.end(grace_s=0.0)
        self._link.disable_monitor()

    def _look_at_connection(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_connected, self._is_alone = True, False
            elif event & _REFUSED:
                raise ConfigError(
                    f"the engine at {self._address} refused the key of this rank; --rank-key-file must have the same on both sides"
                )
            elif self.is_connected:
                self.is_connected = False
                raise EngineDied(f"the engine at {self._address} is gone, and this rank ends with it")

    def _take(self, message: messages.ToJoined) -> None:
        match message:
            case messages.StillHere():
                self._silent_s = message.silent_s
            case messages.Refused():
                raise ConfigError(f"the engine at {self._address} refused this rank: {message.why}")
            case messages.BootFrame():
                self._boot(message)
            case messages.Stacks() if self._ranks is not None:
                self._ranks.dump_stacks()

    def _boot(self, message: messages.BootFrame) -> None:
        """Begin as what the engine says, with this host's own options."""
        boot = msgspec.msgpack.decode(message.frame, type=messages.Boot)
        changes = {name: value for name, value in self._own.items() if value is not None}
        if "model" in changes:
            changes["tokenizer"] = None
        if (why := _missing(boot.options, changes)) is not None:
            self._tell(Death(message.rank, CheckpointError.exit_code, why, ()))
            raise CheckpointError(f"this host {why}")
        boot = msgspec.structs.replace(boot, options=EngineOptions(**(vars(boot.options) | changes)))
        self._ranks = LocalRanks([COMMAND], first=message.rank, is_elsewhere=True)
        self._ranks.boot(message.rank, messages.encode(boot))

    def _tell(self, death: Death) -> None:
        self._link.send(messages.encode(messages.Gone(death=death)))


def host_and_port(address: str, otherwise: str) -> tuple[str, int]:
    """Of tcp://ADDRESS:PORT. Raises `ConfigError` that says `otherwise`: of a port that there is not ZeroMQ would take another."""
    found = re.fullmatch(r"tcp://(.+):(\d+)", address)
    if found is None or int(found[2]) > 65_535:
        raise ConfigError(otherwise)
    return found[1], int(found[2])


def _missing(options: EngineOptions, changes: Mapping[str, object]) -> str | None:
    """What this host does not have of what the engine has, or has beside it."""
    if "draft_model" in changes and options.draft_model is None:
        return f"was given the draft model {changes['draft_model']}, and the engine has none; leave --draft-model out"
    for name, folder in (("model", options.model or ""), ("draft_model", options.draft_model)):
        if name not in changes and folder is not None and not Path(folder).is_dir():
            words, flag = name.replace("_", " "), name.replace("_", "-")
            return f"has no folder {folder}, where the engine's {words} is; tell it another by engine rank --{flag}"
    return None
