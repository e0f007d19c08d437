"""More connections than descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time

import httpx
import pytest
from fake_engine import HELD
from quick_processes import with_files
from running import PATIENCE_S, started, wait_until

from enginery.errors import ConfigError
from enginery.serve.http.listening import Descriptors, bind

FEW = 64


@contextlib.contextmanager
def idle_connections(url, count):
    """Those that the server took or left waiting; one that it closed stays open on this side."""
    host, port = url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S)) for _ in range(count)]


def said_to(connection):
    """What the server has sent by now."""
    connection.settimeout(0.01)
    with contextlib.suppress(TimeoutError):
        return connection.recv(1 << 16)
    return b""


def is_live(url):
    return httpx.get(f"{url}/health/live", timeout=PATIENCE_S).status_code == 200


def completion(url):
    return httpx.post(f"{url}/v1/completions", json={"prompt": "hello world"}, timeout=PATIENCE_S)


def test_the_soft_limit_on_descriptors_is_raised(folder):
    with started(folder, prefix=with_files("-Sn", FEW)) as (_, url), idle_connections(url, 4 * FEW):
        assert completion(url).status_code == 200


def test_without_descriptors_probes_are_answered_streams_go_on_and_the_rest_is_refused(folder, log):
    held = {"prompt": "a b", "seed": HELD, "max_tokens": 20, "ignore_eos": True, "stream": True}
    with started(folder, prefix=with_files("-n", FEW)) as (process, url):
        with (
            httpx.stream("POST", f"{url}/v1/completions", json=held, timeout=PATIENCE_S) as stream,
            idle_connections(url, 4 * FEW) as connections,
        ):
            wait_until(lambda: is_live(url))  # all of them have been taken or refused
            began = time.monotonic()
            for _ in range(50):
                assert is_live(url)
                refused = completion(url)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
                assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
            took_s = time.monotonic() - began
            log.with_name("go").touch()
            assert "[DONE]" in stream.read().decode()
            told = [said_to(connection) for connection in connections]
            politely = [answer for answer in told if answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer]
            assert len(politely) >= len(connections) - FEW, (
                "the others have a place, or had one until they said nothing for too long"
            )
        wait_until(lambda: completion(url).status_code == 200)
        process.terminate()
        lines = process.communicate(timeout=PATIENCE_S)[1].splitlines()
    assert not [line for line in lines if "Traceback" in line or "out of system resource" in line]
    assert 1 <= sum("connections refused" in line for line in lines) <= took_s + 30
    assert sum(f"as {FEW} files may be open" in line for line in lines) == 1


def test_a_connection_in_the_place_of_the_spare_descriptor_is_told_why_it_is_closed():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with bind("127.0.0.1", 0, refusal=b"no") as listener, socket.create_connection(listener.getsockname()) as client:
        listener.setblocking(False)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            for _ in range(2):
                with pytest.raises(BlockingIOError):
                    listener.accept()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.settimeout(PATIENCE_S)
        assert client.recv(100) == b"no"
        with socket.create_connection(listener.getsockname()):
            wait_until(lambda: accepts(listener))


def accepts(listener):
    with contextlib.suppress(BlockingIOError):
        listener.accept()[0].close()
        return True


def test_connections_have_what_is_left_of_the_descriptors(monkeypatch):
    limits = {}
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.update(set=given))
    for soft, hard, wanted in [(1024, 4096, 4096), (20_000, 20_000, 4096), (1024, resource.RLIM_INFINITY, 100)]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, given=(soft, hard): given)
        share = Descriptors.share(wanted)
        assert share.num_connections <= wanted
        assert share.num_connections < share.highest < share.limit
        assert limits.pop("set", (soft, hard)) == (share.limit, hard)
    assert share.num_connections == 100
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    with pytest.raises(ConfigError, match="20 files may be open at a time"):
        Descriptors.share(1)
