"""Clients that are slow, many, gone or not allowed: rows 8 and 18 to 24 of the checklist."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import random
import resource
import socket
import statistics
import time

import httpx
import pytest
from chaos.harness import SETTINGS, Server, started
from pairwise import EVERYTHING
from quick_processes import with_files

LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}  # 1.6 s at the least


def raw(server: Server, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send bytes over a connection of its own; all that comes back until the server closes it."""
    with socket.create_connection(server.address, timeout=20) as connection:
        with contextlib.suppress(OSError):  # the server may have enough before all is sent
            for part in parts:
                connection.sendall(part)
                time.sleep(pause_s)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while chunk := connection.recv(1 << 16):
                answer += chunk
        return answer


def head(path: str = "/v1/completions", **headers: object) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def test_row_8_a_body_of_a_gigabyte_is_refused_before_it_is_sent(server):
    answer = raw(server, head(Content_Length=1 << 30, Connection="close"), b"x" * 1000)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"larger than 8,454,144 bytes" in answer
    assert b"--max-body-bytes" in answer


def test_row_8_a_body_that_does_not_say_its_size_is_refused_when_it_is_too_large(server):
    chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    answer = raw(server, head(Transfer_Encoding="chunked", Connection="close"), *[chunk] * 9)
    assert answer.startswith(b"HTTP/1.1 413")


def test_row_8_a_head_of_a_megabyte_is_refused(server):
    assert raw(server, head(X_Long="y" * (1 << 20))).startswith(b"HTTP/1.1 431")


def test_row_8_a_head_of_98_kilobytes_in_one_packet_is_refused(server):
    assert raw(server, head(X_Long="y" * 98_000)).startswith(b"HTTP/1.1 431")


def test_row_8_uploads_that_do_not_end_cost_a_bounded_sum_and_hold_no_stream_up(server):
    before = server.memory()
    with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True, **LONG}) as stream:
        lines = stream.iter_lines()
        next(lines)
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            uploads = [pool.submit(raw, server, head(Content_Length=8 << 20), b" " * (7 << 20)) for _ in range(16)]
            answers = [upload.result() for upload in uploads]
        assert list(lines)[-2] == "data: [DONE]"
    assert {answer[:12] for answer in answers} == {b"HTTP/1.1 408", b"HTTP/1.1 503"}
    assert all(b"retry-after: 1" in answer.lower() for answer in answers if b" 503 " in answer[:13])
    assert server.memory() - before < 200 << 20


@pytest.mark.parametrize(
    "parts",
    [[b"POST /v1/comp"], [head(Content_Length=100), *[b"{"] * 12], [b"G", b"E", b"T"], []],
    ids=["a head that stops", "a body by the byte", "a word by the letter", "nothing"],
)
def test_row_8_a_slow_sender_is_told_and_holds_nobody_up(server, parts):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        slow = pool.submit(raw, server, *parts, pause_s=0.3)
        assert server.control() == server.answer
        assert slow.result().startswith(b"HTTP/1.1 408")
        assert b"did not arrive whole within 2 s; send it faster, or raise --receive-s" in slow.result()


def test_row_8_more_idle_connections_than_a_process_may_usually_have_files_stop_nothing():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # for this side of the connections
    prefix = with_files("-Sn", 1024)
    try:
        with started(prefix=prefix) as server, concurrent.futures.ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
            running = pool.submit(server.complete, "x", **LONG | {"max_tokens": 900 if EVERYTHING else 400}, stream=True)
            for _ in range(1_100):
                stack.enter_context(socket.create_connection(server.address, timeout=20))
            assert httpx.get(f"{server.url}/health/live", timeout=20).status_code == 200
            assert server.control() == server.answer
            assert running.result().text.endswith("data: [DONE]\n\n")
            assert "Traceback" not in server.said()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_row_8_a_long_answer_is_not_a_slow_request(server):
    """Of `receive_s`, 2 s, only the request's own arrival counts."""
    began = time.monotonic()
    text = server.complete("x", **LONG | {"max_tokens": 700 if EVERYTHING else 550}, stream=True).text
    assert time.monotonic() - began > SETTINGS["limits"]["receive_s"]
    assert text.endswith("data: [DONE]\n\n")


@pytest.fixture(scope="module")
def locked():
    with started("user-key", api_keys=["other", "user-key"], admin_keys=["admin-key"]) as server:
        yield server
        server.assert_healthy()


def test_row_18_every_route_but_the_probes_needs_a_key(locked):
    paths = locked.http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/metrics", "/server_info", "/admin/abort"} <= paths.keys()
    with httpx.Client(base_url=locked.url) as stranger:
        answers = {path: {stranger.request(method, path).status_code for method in methods} for path, methods in paths.items()}
    public = {path for path, statuses in answers.items() if 401 not in statuses}
    assert public == {"/health", "/health/live", "/health/ready", "/health/progress"}
    assert all(statuses == {401} for path, statuses in answers.items() if path not in public)


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models",
        "/V1/models",
        "/v1/../v1/models",
        "/health/../v1/models",
        "/health/live/../../v1/models",
        "/v1/models/",
        "/v1/%6dodels",
        "/health%2f..%2fv1%2fmodels",
        "/health;/v1/models",
        "/health/",
        "http://x/v1/models",
        "/openapi.json",
        "/docs",
        "/nothing",
        "/assets",
        "/assets/",
        "/assets/../v1/models",
        "/assets/./v1/models",
        "/assets/%2e%2e/v1/models",
        "/assets//v1/models",
        "/assetsx/y",
    ],
)
def test_row_18_no_spelling_of_a_path_goes_around_the_key(locked, path):
    answer = raw(locked, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 401"), answer[:200]
    assert b"WWW-Authenticate" in answer or b"www-authenticate" in answer


@pytest.mark.parametrize("path", ["/", "/assets/x.js", "/assets/page-1.0/x/y.mjs"])
def test_row_18_a_page_and_its_files_need_no_key(locked, path):
    assert httpx.get(locked.url + path).status_code in (200, 404)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer user-key"}, 200),
        ({"authorization": "bearer other"}, 200),
        ({"x-api-key": "user-key"}, 200),
        ({"Authorization": "Bearer user-ke"}, 401),
        ({"Authorization": "Bearer user-keyy"}, 401),
        ({"Authorization": "user-key"}, 401),
        ({"Authorization": "Basic user-key"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"x-api-key": "USER-KEY"}, 401),
        ({"x-api-key": b"\xff\xfe"}, 401),
    ],
    ids=str,
)
def test_row_18_a_key_is_taken_in_two_headers_and_to_the_letter(locked, headers, status):
    assert httpx.get(f"{locked.url}/v1/models", headers=headers).status_code == status


def test_row_19_there_are_no_admin_routes_without_an_admin_key(server):
    for path in ("/admin/flush_prefix_cache", "/admin/abort?request_id=x", "/admin/profile?num_steps=1"):
        assert server.http.post(path).status_code == 404


def test_row_19_admin_routes_need_the_admin_key(locked, tmp_path):
    for path in ("/admin/flush_prefix_cache", "/admin/abort?request_id=x", "/admin/profile?num_steps=1"):
        for headers in ({}, {"x-api-key": "user-key"}, {"x-api-key": "wrong"}):
            denied = httpx.post(locked.url + path, headers=headers)
            assert denied.status_code == 401
            assert ("(--admin-key)" in denied.json()["error"]["message"]) == ("user-key" in headers.values())
    admin = httpx.Client(base_url=locked.url, headers={"x-api-key": "admin-key"})
    with admin:
        for query in ("", "?num_steps=many"):
            wrong = admin.post(f"/admin/profile{query}")
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "num_steps")
        assert "pages were freed" in admin.post("/admin/flush_prefix_cache").json()["told"]
        assert admin.post("/admin/abort", params={"request_id": "nobody"}).status_code == 400
        assert admin.post("/admin/profile", params={"num_steps": 0}).status_code == 400
        body = {"prompt": "x", **LONG, "max_tokens": 1000, "stream": True}
        with locked.http.stream("POST", "/v1/completions", json=body) as response:
            events = response.iter_lines()
            name = json.loads(next(events).removeprefix("data: "))["id"]
            assert admin.post("/admin/abort", params={"request_id": f"{name}-0"}).status_code == 200
            assert any("aborted by an administrator" in line for line in events)
    assert "user-key" not in locked.said()
    assert "-key" not in locked.http.get("/server_info").text.replace("needs_key", "")


def test_row_20_another_origin_gets_nothing(server):
    answer = server.http.options("/v1/models", headers={"Origin": "https://evil", "Access-Control-Request-Method": "GET"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_row_20_an_allowed_origin_gets_no_credentials_and_others_get_nothing():
    with started("k", api_keys=["k"], allow_origins=["https://good"]) as server:
        for origin, allowed in (("https://good", "https://good"), ("https://evil", None)):
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
            for answer in (
                server.http.options("/v1/completions", headers=asked),
                server.http.get("/v1/models", headers={"Origin": origin}),
            ):
                assert answer.headers.get("access-control-allow-origin") == allowed
                assert "access-control-allow-credentials" not in answer.headers
        server.assert_healthy()


async def hang_up(server: Server, body: dict[str, object], *, after_s: float, parts: int) -> int:
    """Send a request and go, after some time or so many parts of the answer. 1 if it had been answered to the end by then."""
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(head(Content_Length=len(content)) + content)
    await writer.drain()
    received = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(after_s):
            while received.count(b"\r\n") < parts and (chunk := await reader.read(4096)):
                received += chunk
    writer.transport.abort()
    return int(b"[DONE]" in received or b'"usage":{' in received)


CLIENTS = 250 if EVERYTHING else 80  # a phase


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode", "any"])
def test_row_21_clients_that_hang_up_leave_nothing(server, phase):
    """While they wait for others, in the chunks of a long prompt, amid the output, and whenever."""
    chance = random.Random(phase)
    prompt = {"queued": 20, "prefill": 500, "decode": 5, "any": 60}[phase]
    after_s = {"queued": 0.3, "prefill": 0.3, "decode": 3.0, "any": 0.5}[phase]
    before = {reason: server.metric("vllm:request_success_total", finished_reason=reason) for reason in ("abort", "stop", "length")}

    async def one(number: int) -> int:
        body = {
            "prompt": [5 + number % 200] * chance.randint(1, prompt),
            **LONG,
            "stream": number % 3 > 0,
            "cache_salt": str(number % 7),
        }
        return await hang_up(server, body, after_s=chance.uniform(0.1, 1) * after_s, parts=chance.randint(9, 20))

    async def every() -> int:
        crowd = asyncio.Semaphore(40 if phase == "queued" else 12)

        async def some(number: int) -> int:
            async with crowd:
                return await one(number)

        return sum(await asyncio.gather(*(some(number) for number in range(CLIENTS))))

    finished = asyncio.run(every())
    server.until(server.is_idle)
    grown = {
        reason: server.metric("vllm:request_success_total", finished_reason=reason) - count for reason, count in before.items()
    }
    assert finished <= grown["length"] + grown["stop"]
    assert grown["abort"] > CLIENTS // 5, grown
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0


def test_row_22_a_client_that_does_not_read_is_cut_and_others_are_not_held_up(server):
    """The answers are larger than what the kernel keeps for a connection, and take longer than a client may read nothing."""
    before, memory = server.metric("vllm:request_success_total", finished_reason="abort"), server.memory()
    body = json.dumps({"prompt": "x", "n": 4, **LONG, "max_tokens": 1000, "logprobs": 20, "stream": True}).encode()
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(4):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(server.address)
            connection.sendall(head(Content_Length=len(body)) + body)
            connections.append(connection)
        assert server.control() == server.answer
        server.until(lambda: server.metric("vllm:request_success_total", finished_reason="abort") > before)
        server.until(server.is_idle)
    assert server.memory() - memory < 64 << 20


def test_row_23_overload_is_refused_and_gone_when_it_is_over(server):
    """There is room for 80 choices, in 0.3 or 0.6 s for sixteen more; 480 come at once."""
    before = server.metric("vllm:admission_rejections_total")

    def ask(number: int) -> httpx.Response:
        return server.complete([5 + number], **LONG | {"max_tokens": 150 if EVERYTHING else 75}, n=8)

    with concurrent.futures.ThreadPoolExecutor(60) as pool:
        answers = list(pool.map(ask, range(60)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
    assert server.metric("vllm:admission_rejections_total") > before
    server.assert_healthy()


def test_row_24_long_prompts_do_not_hold_running_streams_up(server):
    """A step takes 128 tokens at the most, so a prompt of 900 takes eight, and in each of them every stream gets its token.

    Counted, not timed: how long a step takes is the machine's affair.
    """

    def stream(number: int) -> list[float]:
        """When its tokens came."""
        body = {"prompt": "x", **LONG, "stream": True, "cache_salt": f"stream {number}"}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            return [time.monotonic() for line in response.iter_lines() if line]

    def inject(number: int) -> tuple[float, float]:
        """From when to when a long prompt was computed."""
        began = time.monotonic()
        assert server.complete([7 + number] * 900, max_tokens=1, cache_salt=f"prompt {number}").status_code == 200
        return began, time.monotonic()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream, number) for number in range(4)]
        server.until(lambda: server.metric("vllm:num_requests_running") == 4)
        prompts = [inject(number) for number in range(3)]
        arrived = [found.result() for found in streams]
    during = [sum(began < at < ended for at in times) for times in arrived for began, ended in prompts]
    assert statistics.median(during) >= 3, during  # a client is slow to read some of them; without chunks it would be one
