"""Whether a cluster may be at an address. Imports no Ray, which would try for ever where none is."""

from __future__ import annotations

import os
import re
import socket
import time
from typing import Final

_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # HTTP/2's first bytes and empty settings: gRPC
_SETTINGS: Final = 4  # the kind of the frame that is answered


def reach(address: str, within_s: float, *, look_s: float) -> None:
    """Raise `OSError` where nobody speaks gRPC for so long. Of an address that is no HOST:PORT Ray knows more."""
    found = re.fullmatch(r"\[?([^/\[\]]+)\]?:(\d+)", address)
    end_s = time.monotonic() + within_s
    while found is not None:
        try:
            _greet(found[1], int(found[2]), within_s)
            break
        except (OSError, OverflowError) as error:
            if time.monotonic() > end_s:
                raise OSError(f"nothing has answered at RAY_ADDRESS {address} for {within_s:g} s: {error}") from error
            time.sleep(look_s)


def _greet(host: str, port: int, within_s: float) -> None:
    with socket.create_connection((host, port), timeout=within_s) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":  # then it waits for another hello
            return
        connection.sendall(_HELLO)
        if connection.recv(9, socket.MSG_WAITALL)[3:4] != bytes((_SETTINGS,)):
            raise OSError("what listens there is no Ray (its head's GCS, port 6379 unless told otherwise)")
