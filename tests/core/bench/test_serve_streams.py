"""engine bench serve: streams whose end is told in other ways than in chunks, that end early, and what refusals say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
from scripted_server import STREAM, USAGE, Scripted, chunked, event, one, using

from enginery.bench.serve_load import Call, Client, Load, run_load

CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


def answer(scripted: Scripted, head: bytes, pieces: Sequence[bytes] = (), *, is_last: bool = True) -> None:
    """Have it answer with these bytes, and then close the connection if this is the last answer there."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(scripted.pause_s)
        if is_last:
            writer.close()

    scripted.script = script


@pytest.mark.parametrize(
    "head",
    [
        CLOSING,
        b"HTTP/1.0 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(b"".join(STREAM)),
    ],
    ids=["close", "http-1.0", "length"],
)
def test_a_stream_without_chunks_is_timed_as_it_comes(server, head: bytes) -> None:
    scripted, url = server
    scripted.pause_s = 0.2
    answer(scripted, head, STREAM)
    call = one(url)
    assert (call.error, call.num_tokens, len(call.times)) == (None, 3, 3)
    assert call.times[2] - call.times[0] > 0.1
    assert call.times[2] + 0.1 < call.ended_s < time.perf_counter()


def test_a_stream_with_a_length_that_is_cut_is_an_error(server) -> None:
    scripted, url = server
    answer(scripted, b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", STREAM)
    assert "closed the connection in the middle" in one(url).error


def test_no_connection_of_http_1_0_is_used_again(server) -> None:
    scripted, url = server
    head = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(b"".join(STREAM))
    answer(scripted, head, STREAM, is_last=False)  # as a server that closes late
    calls = using(url, lambda client: run_load(client, [b"{}"] * 3, Load(lengths=())))
    assert [call.error for call in calls] == [None] * 3
    assert scripted.num_connections == 3


@pytest.mark.parametrize("head", [CLOSING, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"], ids=["close", "chunked"])
@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([event("a"), event("b")], "the stream ended early"),
        ([event("a"), b'data: {"choices": [{"te'], "the stream ended early"),
        ([event("a"), event("", "length")], None),
        ([event("a", "length")], None),
        ([event("a"), USAGE], None),
        ([event("a"), b"data: [DONE]"], None),
    ],
)
def test_a_stream_is_whole_once_the_server_says_so(server, head: bytes, parts: list[bytes], error: str | None) -> None:
    scripted, url = server
    answer(scripted, head, parts if head == CLOSING else [*map(chunked, parts), b"0\r\n\r\n"])
    assert one(url).error == error


def test_a_refusal_of_several_lines_is_told_whole_in_one(server) -> None:
    scripted, url = server
    body = b'{\n  "error": {\n    "message": "no such model"\n  }\n}\n'
    answer(scripted, b"HTTP/1.1 404 No\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    assert one(url).error == 'status 404: { "error": { "message": "no such model" } }'
    answer(scripted, b"HTTP/1.0 500 Bug\r\n\r\n", [b"x" * 1000] * 3)
    assert one(url).error == "status 500: " + "x" * 500


def test_a_first_event_without_text_is_no_token(server) -> None:
    """Some servers open a stream so before they have computed anything."""
    scripted, url = server
    scripted.pause_s = 0.2
    answer(scripted, CLOSING, [event(""), *STREAM])
    began_s = time.perf_counter()
    call: Call = one(url)
    assert (call.error, len(call.times)) == (None, 3)
    assert call.times[0] - began_s > 0.15


def test_the_body_of_a_list_of_models_may_end_with_its_connection(server) -> None:
    scripted, url = server
    scripted.head_of_models = b"HTTP/1.0 200 OK\r\n\r\n"
    assert using(url, Client.first_model).id == "m"
