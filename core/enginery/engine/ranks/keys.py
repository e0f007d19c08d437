"""The key of an engine whose ranks are on several hosts: one text, in a file that each host has a copy of.

Both sides derive the same two CURVE pairs from it (http://curvezmq.org), one for the engine and one for its ranks: whoever lacks
the text gets no further than the handshake, and cannot read what others say.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sys
from pathlib import Path
from typing import Final

import zmq
import zmq.utils.z85

from enginery.errors import ConfigError

_BYTES: Final = 32
STDIN: Final = "-"  # in place of a file


class RankKey:
    """text: 64 hexadecimal digits. Raises `ConfigError` for any other."""

    def __init__(self, text: str, source: str = "the key") -> None:
        if not re.fullmatch(rf"[0-9a-f]{{{2 * _BYTES}}}", text):
            raise ConfigError(f"{source} is no key of ranks; engine rank --new-key FILE makes one, and every host gets a copy")
        self.text = text
        self._engine, self._rank = _pair(text, b"engine"), _pair(text, b"rank")

    @classmethod
    def new(cls) -> RankKey:
        return cls(secrets.token_hex(_BYTES))

    @classmethod
    def read(cls, file: str) -> RankKey:
        """The first line of a file, or of stdin."""
        try:
            with sys.stdin if file == STDIN else Path(file).open(encoding="utf-8") as stream:
                return cls(stream.readline().strip(), file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the key of ranks cannot be read from {file}: {error}") from error

    def write(self, file: Path) -> None:
        """For its owner alone. Raises `ConfigError` where there is a file already."""
        try:
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
                stream.write(f"{self.text}\n")
        except FileExistsError as error:
            raise ConfigError(f"{file} is there already, and a key stays as it is; name another file") from error
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}") from error

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a public key is that of ranks: what `zmq.auth` asks."""
        return key == self._rank[0]

    def secure_engine(self, socket: zmq.Socket[bytes]) -> None:
        """Before it is bound. Of its context an authenticator has to run, which asks `callback`."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._engine

    def secure_rank(self, socket: zmq.Socket[bytes]) -> None:
        """Before it is connected."""
        socket.curve_serverkey = self._engine[0]
        socket.curve_publickey, socket.curve_secretkey = self._rank


def _pair(text: str, whose: bytes) -> tuple[bytes, bytes]:
    """Public and secret, in Z85."""
    derived = hashlib.blake2b(bytes.fromhex(text), digest_size=_BYTES, person=whose).digest()
    secret = zmq.utils.z85.encode(derived)
    return zmq.curve_public(secret), secret
