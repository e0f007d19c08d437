"""An address where something else than Ray listens ends a start soon. Needs no Ray."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from enginery_executor_ray.address import reach

Serve = Callable[[bytes], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Listens, answers everybody with these bytes, and says where."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        kept, threads = list[socket.socket](), list[threading.Thread]()

        def start(answer: bytes) -> str:
            def run() -> None:
                while True:
                    try:
                        connection, _ = listening.accept()
                    except OSError:
                        return
                    kept.append(connection)
                    connection.sendall(answer)

            threads.append(threading.Thread(target=run, daemon=True))
            threads[-1].start()
            return f"127.0.0.1:{listening.getsockname()[1]}"

        yield start
        listening.shutdown(socket.SHUT_RDWR)
        for thread in threads:  # one may have taken a connection that it has not kept yet
            thread.join()
    for connection in kept:
        connection.close()


@pytest.mark.parametrize(
    ("answer", "told"), [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "what listens there is no Ray"), (b"", "timed out")]
)
def test_what_is_no_ray_is_told_soon(serve: Serve, answer: bytes, told: str) -> None:
    """Ray itself would try for ever."""
    address, began_s = serve(answer), time.monotonic()
    with pytest.raises(OSError, match=rf"nothing has answered at RAY_ADDRESS {address} for 0.3 s: {told}"):
        reach(address, 0.3, look_s=0.05)
    assert time.monotonic() - began_s < 10


def test_what_speaks_grpc_may_be_ray(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    reach(serve(b"\0\0\0\4\0\0\0\0\0"), 5.0, look_s=0.05)
    monkeypatch.setitem(os.environ, "RAY_USE_TLS", "1")
    reach(serve(b""), 5.0, look_s=0.05)
