"""Large and hostile bodies: the rest of the server goes on meanwhile, and memory stays bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from running import PATIENCE_S, started, wait_until

from enginery.errors import RequestError
from enginery.plugin import near
from enginery.serve.http.body_limits import BodyBounds, BodyLimits
from enginery.serve.http.faults import BodyTooLarge, TooManyBodies
from enginery.serve.schemas.body_decoding import MAX_NUMBERS, MAX_VALUES, decode_request
from enginery.serve.schemas.chat import ChatRequest
from enginery.serve.schemas.completions import CompletionRequest
from enginery.serve.schemas.responses import ResponsesRequest

LARGE = 31 << 20
CONTEXT = 131_072
HI = b'"messages": [{"role": "user", "content": "hi"}]'


def filled(head: bytes, unit: bytes, tail: bytes) -> bytes:
    return head + unit * ((LARGE - len(head) - len(tail)) // len(unit)) + tail


def numbered(head: bytes, entry: bytes, tail: bytes) -> bytes:
    return head + b",".join(entry % number for number in range(2_000_000)) + tail


def reasoning(count: int, text: str) -> bytes:
    item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}
    return json.dumps({"input": [item] * count}).encode()


TOOL = b'"tools": [{"type": "function", "function": {"name": "f", "parameters": '
CALL = b'"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '
WORDS = b"the quick brown fox "
ATTACKS: dict[str, tuple[str, Callable[[], bytes], int, str]] = {
    "a name": ("completions", lambda: b'{"prompt": "x", "' + b"n" * LARGE + b'": 1}', 400, "'nnn"),
    "unknown": ("completions", lambda: filled(b'{"prompt": "x", "foo": [', b"[],", b"[]]}"), 400, "262,144"),
    "no messages": ("chat/completions", lambda: filled(b'{"messages": [', b"{},", b"{}]}"), 400, "262,144"),
    "tokens": ("completions", lambda: filled(b'{"prompt": [', b"1,", b"1]}"), 400, "2,097,152"),
    "lists": ("completions", lambda: filled(b'{"prompt": [', b"[],", b"[]]}"), 400, "262,144"),
    "texts": ("completions", lambda: filled(b'{"prompt": [', b'"a",', b'"a"]}'), 400, "262,144"),
    "metadata": ("completions", lambda: numbered(b'{"prompt": "x", "metadata": {', b'"%x":""', b"}}"), 400, "262,144"),
    "names": ("completions", lambda: numbered(b'{"prompt": "x", ', b'"%x":1', b"}"), 400, "262,144"),
    "nulls": ("completions", lambda: numbered(b'{"prompt": "x", ', b'"%x":null', b"}"), 400, "262,144"),
    "a role": ("chat/completions", lambda: filled(b'{"messages": [{"role": "', b"r", b'"}]}'), 400, "must be 'assistant'"),
    "a choice": (
        "chat/completions",
        lambda: filled(b"{" + HI + b', "tool_choice": {"type": "function", "function": {"name": "', b"r", b'"}}}'),
        400,
        "1024",
    ),
    "a schema": ("chat/completions", lambda: filled(b"{" + HI + b"," + TOOL + b'{"a": [', b"{},", b"{}]}}}]}"), 400, "262,144"),
    "digits": (
        "completions",
        lambda: filled(b'{"prompt": "x", "guided_json": {"a": [', b"9" * 4000 + b",", b"1]}}"),
        400,
        "100 digits",
    ),
    "arguments": (
        "chat/completions",
        lambda: filled(b'{"messages": [{"role": "assistant", ' + CALL + b'"{\\"a\\": [', b"[],", b'[]]}"}}]}]}'),
        400,
        "262,144",
    ),
    "reasoning": ("responses", lambda: reasoning(8000, "r" * 3900), 200, "completed"),
    "blocks": (
        "messages",
        lambda: filled(b'{"max_tokens": 1, "messages": [{"role": "user", "content": [', b'{"type":"text","text":""},', b"{}]}]}"),
        400,
        "262,144",
    ),
    "a batch": ("embeddings", lambda: json.dumps({"input": ["the quick brown fox " * 200] * 1024}).encode(), 200, "embedding"),
    "a long prompt": ("completions", lambda: filled(b'{"prompt": "', WORDS, b'"}'), 400, "131,072 tokens"),
    "a prompt that may fit": ("completions", lambda: b'{"prompt": "' + WORDS * 90_000 + b'"}', 400, "131,072 tokens"),
    "tokenize": ("tokenize", lambda: b'{"return_token_strs": true, "prompt": "' + WORDS * 45_000 + b'"}', 200, "token_strs"),
    "detokenize": ("detokenize", lambda: b'{"tokens": [' + b"5," * 2_000_000 + b"5]}", 200, "prompt"),
}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    with started(folder, max_model_len=CONTEXT, max_body_bytes=32 << 20) as (process, url):
        yield psutil.Process(process.pid), url


@pytest.fixture(scope="module")
def second() -> float:
    """Of this machine: how much of its processor's time a quiet one takes a second for."""
    began = time.thread_time()
    sum(number & 1 for number in range(1_000_000))
    return max(1.0, (time.thread_time() - began) / 0.05)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def peak_bytes(process: psutil.Process) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


class Watch:
    """Asks whether a server is live, again and again. worst_s: of its own processor's time that an answer took.

    So what else runs on this machine does not count.
    """

    def __init__(self, process: psutil.Process, url: str) -> None:
        self.worst_s = 0.0
        self.num_answers = 0
        self._process, self._url = process, url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S) as http:
            while not self._over.is_set():
                before = cpu_s(self._process)
                assert http.get("/health/live").status_code == 200
                self.worst_s = max(self.worst_s, cpu_s(self._process) - before)
                self.num_answers += 1
                time.sleep(0.005)


@pytest.mark.parametrize("name", ATTACKS)
def test_the_server_is_live_and_small_whatever_a_body_holds(server, second, name):
    process, url = server
    path, make, status, told = ATTACKS[name]
    body = make()
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak begins here
    before = peak_bytes(process)
    with Watch(process, url) as watch:
        address = f"{url}/{path}" if "tokenize" in path else f"{url}/v1/{path}"
        answer = httpx.post(address, content=body, timeout=PATIENCE_S)
    assert (answer.status_code, told in answer.text) == (status, True), answer.text[:500]
    assert status == 200 or len(answer.content) < 2000
    assert watch.num_answers > 0
    assert watch.worst_s < second
    assert peak_bytes(process) - before < 400 << 20


def test_the_bound_on_a_body_follows_from_the_context_and_is_told(server):
    told = httpx.get(f"{server[1]}/server_info", timeout=PATIENCE_S).json()["server"]
    assert (told["max_body_bytes"], told["max_total_body_bytes"]) == (32 << 20, 256 << 20)
    assert BodyLimits.of(512) == BodyLimits(one=(8 << 20) + 512 * 64, total=8 * ((8 << 20) + 512 * 64))
    assert BodyLimits.of(CONTEXT).one == 16 << 20
    assert BodyLimits.of(10**7).one == 32 << 20
    assert BodyLimits.of(512, one=1000) == BodyLimits(one=1000, total=8000)
    assert BodyLimits.of(512, one=1000, total=500).total == 500


def begin(url: str, size: int, *, announced: int) -> socket.socket:
    """An upload that goes no further than `size` bytes."""
    host, port = url.removeprefix("http://").split(":")
    upload = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    upload.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % announced)
    with contextlib.suppress(OSError):  # it may have been refused by now
        upload.sendall(b" " * size)
    return upload


def test_unfinished_uploads_are_bounded_together_and_keep_no_small_request_out(folder):
    settings = {"max_body_bytes": 32 << 20, "max_total_body_bytes": 64 << 20}
    with started(folder, **settings) as (running, url), contextlib.ExitStack() as open_:
        process = psutil.Process(running.pid)
        before = peak_bytes(process)
        uploads = [open_.enter_context(begin(url, 30 << 20, announced=31 << 20)) for _ in range(12)]
        refused = httpx.post(f"{url}/v1/completions", content=b" " * (8 << 20), timeout=PATIENCE_S)  # two of 30 MiB are held
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_bodies")
        assert refused.headers["retry-after"] == "1"
        assert "67,108,864 bytes; try again" in refused.json()["error"]["message"]
        small = {"prompt": "hello", "user": "u" * 60_000}
        assert httpx.post(f"{url}/v1/completions", json=small, timeout=PATIENCE_S).status_code == 200
        assert peak_bytes(process) - before < 250 << 20
        for upload in uploads:
            upload.close()
        body = b'{"prompt": "hello"' + b" " * (20 << 20) + b"}"
        wait_until(lambda: httpx.post(f"{url}/v1/completions", content=body, timeout=PATIENCE_S).status_code == 200)


@pytest.mark.parametrize("end", ["answers", "breaks", "is cancelled", "is refused"])
def test_a_request_gives_its_bytes_back_however_it_ends(end):
    limits = BodyLimits(one=3 << 20, total=1 << 20)
    taken = []

    async def app(scope, receive, send):
        message = await receive()
        taken.append(len(message["body"]))
        if end == "breaks":
            raise ZeroDivisionError
        if end == "is cancelled":
            await asyncio.sleep(PATIENCE_S)
        await receive()

    async def request(bounds, *parts):
        messages = iter([*({"type": "http.request", "body": part} for part in parts), {"type": "http.disconnect"}])

        async def receive():
            return next(messages)

        await bounds({"type": "http", "headers": []}, receive, None)

    async def scenario():
        bounds = BodyBounds(app, lambda: limits)
        parts = [b"x" * (1 << 20)] * (2 if end == "is refused" else 1)
        for _ in range(5):
            task = asyncio.create_task(request(bounds, *parts))
            await asyncio.sleep(0)
            if end == "is cancelled":
                task.cancel()
            (error,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(error, TooManyBodies) == (end == "is refused"), error

    asyncio.run(scenario())
    assert taken == [1 << 20] * 5


def test_a_body_is_refused_by_what_it_announces_and_by_what_comes():
    async def app(scope, receive, send):
        await receive()

    async def receive():
        return {"type": "http.request", "body": b"x" * 11}

    for headers in ([(b"content-length", b"1" + b"0" * 30)], []):
        with pytest.raises(BodyTooLarge, match=r"larger than 10 bytes; .* --max-body-bytes"):
            asyncio.run(BodyBounds(app, lambda: BodyLimits(one=10, total=100))({"type": "http", "headers": headers}, receive, None))


def head(size: int, *, pad: bytes = b"") -> bytes:
    name = b"GET /health/live HTTP/1.1\r\nHost: x\r\nX-Long:"
    return name + pad + b"y" * (size - len(name) - len(pad) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (head(65_536) + head(200), [200, 200]),
        (head(65_537), [431]),
        (head(98_000), [431]),
        (head(98_000, pad=b" " * 90_000), [431]),
        (head(200) + head(98_000), [200, 431]),
    ],
    ids=["as large as may be", "a byte more", "in one packet", "of spaces", "after another"],
)
def test_a_head_is_bounded_even_in_one_packet(server, sent, statuses):
    host, port = server[1].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(sent)
        answer = b""
        while answer.count(b"HTTP/1.1 ") < len(statuses):
            answer += connection.recv(1 << 16)
    assert [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]] == statuses


def test_a_body_of_very_many_chunks_is_refused_while_it_comes(server, second):
    process, url = server
    host, port = url.removeprefix("http://").split(":")
    begun = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    before = cpu_s(process)
    with Watch(process, url) as watch, socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(begun + b"1\r\nx\r\n" * 70_000)
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"more than 65,536 chunks; send larger ones" in answer
    assert watch.worst_s < second
    assert cpu_s(process) - before < 4 * second


def test_a_name_longer_than_any_known_one_is_compared_with_none(monkeypatch):
    compared = []
    monkeypatch.setattr(near, "SequenceMatcher", lambda _, name, *__, **___: compared.append(name))
    assert near.did_you_mean("n" * 1_000_000, ["temperature"]) == ""
    assert compared == []
    monkeypatch.undo()
    assert near.did_you_mean("temprature", ["temperature"]) == "; did you mean temperature?"


def refusal(body: bytes, kind: type[msgspec.Struct] = CompletionRequest) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as caught:
        decode_request(body, kind)
    return str(caught.value), caught.value.param


def test_a_long_name_or_value_is_told_in_part():
    message, param = refusal(b'{"' + b"n" * 10_000 + b'": 1}')
    assert (len(message) < 300, param) == (True, "n" * 100)
    message, param = refusal(b'{"messages": [{"role": "' + b"r" * 10_000 + b'"}]}', ChatRequest)
    assert message.startswith("messages[0].role is 'rrr")
    assert message.endswith("but must be 'assistant' or 'developer' or 'system' or 'tool' or 'user'")
    assert (len(message) < 800, param) == (True, "messages")


def test_what_is_null_is_absent_whatever_its_name_is():
    body = {"prompt": "x", "max_tokens": None, "surprise": None, "suffix": None, "guided_json": {"default": None, "odd": [None]}}
    assert decode_request(json.dumps(body).encode(), CompletionRequest).guided_json == {"default": None, "odd": [None]}
    message = {"role": "assistant", "content": "x", "refusal": None, "annotations": None}
    asked = decode_request(json.dumps({"messages": [message], "audio": None}).encode(), ChatRequest)
    assert asked.messages[0].content == "x"
    item = {"type": None, "role": "user", "content": "x", "odd": None}
    assert decode_request(json.dumps({"input": [item]}).encode(), ResponsesRequest).input[0].type == "message"
    assert refusal(b'{"prompt": "x", "odd": null, "surprise": 1}') == (
        "'surprise' is not accepted: there is no such field",
        "surprise",
    )
    assert refusal(b'{"prompt": null, "odd": null}')[1] == "prompt"
    assert refusal(b'{"messages": [{"role": "user", "content": "x", "a": null, "b": 1}]}', ChatRequest)[1] == "messages"


def test_nulls_of_parts_calls_and_tools_are_absent_and_those_of_schemas_are_not():
    call = {"id": "c", "type": None, "index": None, "function": {"name": "f", "arguments": '{"a": null}', "odd": None}}
    parts = [{"type": "text", "text": "x", "image_url": None}]
    parameters = {"type": "object", "properties": {"a": {"default": None, "enum": [None]}}}
    body = {
        "messages": [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": parts},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": None, "odd": None}, "odd": None}
        ],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": parameters, "odd": None}, "odd": None},
    }
    asked = decode_request(json.dumps(body).encode(), ChatRequest)
    assert asked.messages[1].tool_calls[0].function.arguments == '{"a": null}'
    assert asked.tools[0].function.parameters == asked.response_format.json_schema.schema == parameters
    assert (
        refusal(json.dumps(body | {"tools": [{"type": "function", "function": {"name": "f", "odd": 1}}]}).encode(), ChatRequest)[1]
        == "tools"
    )


def test_a_byte_order_mark_is_ignored():
    assert decode_request(b'\xef\xbb\xbf{"prompt": "x"}', CompletionRequest).prompt == "x"
    assert decode_request(bytearray(b'\xef\xbb\xbf{"prompt": "x"}'), CompletionRequest).prompt == "x"
    assert "empty" in refusal(b"\xef\xbb\xbf")[0]


def test_structure_is_counted_and_texts_are_not():
    much = '{[,"\\' * (MAX_VALUES + 1)
    assert decode_request(json.dumps({"prompt": much}).encode(), CompletionRequest).prompt == much
    assert decode_request(b'{"prompt": "' + b"9" * 1000 + b'"}', CompletionRequest).prompt == "9" * 1000
    commas = b"," * (MAX_NUMBERS + 1)
    assert decode_request(b'{"prompt": "' + commas + b'"}', CompletionRequest).prompt == commas.decode()
    assert "numbers" in refusal(b'{"prompt": [' + b"1," * (MAX_NUMBERS + 1) + b"1]}")[0]
    assert "262,144 texts" in refusal(b'{"prompt": "' + commas + b'", "stop": [' + b'"a",' * MAX_VALUES + b'"a"]}')[0]
    assert "100 digits" in refusal(b'{"prompt": "' + b"9" * 1000 + b'", "guided_json": {"a": ' + b"1" * 101 + b"}}")[0]
    assert refusal(b'{"prompt": "x", "guided_json": {"a": ' + b"9" * 20 + b"}}")[1] == "guided_json"
