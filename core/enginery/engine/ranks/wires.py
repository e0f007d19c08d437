"""What the engine's own rank opens for the others: sockets, and the store through which their groups of tensors meet.

    ranks of this host     ipc in a private folder, a file
    ranks of any host      tcp with keys at one interface, a TCPStore there, which has none

Ports but the one where ranks join are any that are free: the boot frame tells them.
"""

from __future__ import annotations

import fcntl
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Final, TypeAlias

import zmq
from zmq.auth.thread import ThreadAuthenticator

from enginery.child_process import remove_left_folders
from enginery.config.schema import EngineOptions
from enginery.contracts.parallel import ExecutorSpec
from enginery.engine.ranks.join import host_and_port
from enginery.engine.ranks.joined import Door, Listening
from enginery.engine.ranks.keys import RankKey
from enginery.errors import ConfigError
from enginery.worker.ranks.gloo import LOOPBACK, MeetingStore, listening_store, open_store

_EVERYWHERE: Final = ("*", "0.0.0.0")


class HostWires:
    """On this host: nobody else can enter the folder. Who finds it not held any more removes it.

    host: address at which tensors are exchanged. address: where ranks join, with this key; empty: they are started here.
    """

    host, address, key = LOOPBACK, "", ""

    def __init__(self) -> None:
        remove_left_folders()
        self._folder = Path(tempfile.mkdtemp(prefix="enginery-"))  # mode 0700
        self._held = (self._folder / "held").open("w")  # by this process to its end, from before there is a socket
        fcntl.flock(self._held, fcntl.LOCK_EX)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def bind(self, kind: int, name: str) -> tuple[zmq.Socket[bytes], str]:
        """A socket, and its address. name: no other's. Raises `ConfigError`."""
        link = self._context.socket(kind)
        link.set_hwm(0)
        address = f"ipc://{self._folder / name}"
        try:
            link.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"{self._folder} cannot hold sockets: {error}; set TMPDIR to another, shorter path") from error
        return link, address

    def store(self, num_ranks: int) -> tuple[MeetingStore, str]:
        """Where groups meet, and its address."""
        address = str(self._folder / "meeting")
        return open_store(address, num_ranks), address

    def joining(self, count: int) -> Listening | None:
        """How the other ranks come; None: they are started here. To be called once."""
        return None

    def close(self) -> None:
        """When no socket is used any more."""
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._held.close()


class TcpWires:
    """The same at one interface of this host, for ranks of any. Raises `ConfigError` where that cannot be listened at."""

    def __init__(self, address: str, key: RankKey, *, deadline_s: float, replica: int = 0) -> None:
        """address: tcp://ADDRESS:PORT. deadline_s: without a sign of life for so long, a connection is lost.

        replica: among engines that were given one address; the port is so much higher, unless it is any.
        """
        self.host, port = _place(address)
        if port + replica > 65535:  # ZeroMQ would begin at 0 again
            raise ConfigError(f"replica {replica} would listen at port {port + replica}, but 65535 is the last; name a lower one")
        self.key = key.text
        self._key, self._deadline_s = key, deadline_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", key)
        try:
            self._door, self.address = self.bind(zmq.ROUTER, "joining", port and port + replica)
        except BaseException:
            self.close()
            raise

    def bind(self, kind: int, name: str, port: int = 0) -> tuple[zmq.Socket[bytes], str]:
        """port: 0 for any that is free."""
        link = self._context.socket(kind)
        link.set_hwm(0)
        self._key.secure_engine(link)
        link.heartbeat_timeout = int(1000 * self._deadline_s)
        link.heartbeat_ivl = link.heartbeat_timeout // 4
        try:
            link.bind(f"tcp://{self.host}:{port or '*'}")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"ranks cannot join at tcp://{self.host}:{port}: {error}; --listen takes a free port of an address of this host"
            ) from error
        return link, link.getsockopt_string(zmq.LAST_ENDPOINT)

    def store(self, num_ranks: int) -> tuple[MeetingStore, str]:
        return listening_store(self.host)

    def joining(self, count: int) -> Listening | None:
        return Listening(Door(self._door, self.address), self.key, count=count, deadline_s=self._deadline_s)

    def close(self) -> None:
        self._authenticator.stop()
        self._context.destroy(linger=0)


Wires: TypeAlias = HostWires | TcpWires


def wires_of(asked: EngineOptions, executor: ExecutorSpec) -> Wires:
    """As the executor needs them. Raises `ConfigError` for options that it does not use, or lacks."""
    if executor.listen is None:
        if asked.listen is not None or asked.rank_key_file is not None:
            raise ConfigError(
                f"--listen and --rank-key-file are for ranks that join, but --executor {executor.name} starts them on this host; "
                "give --executor join, or leave them out"
            )
        return HostWires()
    if asked.rank_key_file is None and asked.listen is not None and executor.name == "join":  # others bring it to their ranks
        raise ConfigError("--listen without --rank-key-file lets nobody in; engine rank --new-key FILE makes a key")
    key = RankKey.new() if asked.rank_key_file is None else RankKey.read(asked.rank_key_file)
    return TcpWires(executor.listen(asked.listen), key, deadline_s=asked.step_deadline, replica=asked.dp_rank)


def _place(address: str) -> tuple[str, int]:
    host, port = host_and_port(address, f"listen is {address!r}, but must be tcp://ADDRESS:PORT")
    if host in _EVERYWHERE:
        raise ConfigError(
            f"listen is {address!r}, every interface; but tensors are exchanged without keys, so name the address of a private "
            "interface, which the other hosts reach"
        )
    try:
        return socket.gethostbyname(host), port
    except OSError as error:
        raise ConfigError(f"listen is {address!r}, but {host} has no address: {error}") from error
