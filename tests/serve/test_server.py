"""The whole server as a process: official client, signals, ports, deaths."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import httpx
import openai
import psutil
import pytest
import quick_processes
from fake_engine import COMMAND, FAIL, HELD
from process_table import is_running, wait_until_gone
from running import PATIENCE_S, SERVER, child_of, is_stopping, started, wait_until

from enginery.cli.chat import ServerPartner
from enginery.cli.doctor_checks import port_check
from enginery.errors import EnginError

UNICODE = "naïve 日本語 👩‍👩‍👧‍👦😀"
get, head, post = (partial(ask, timeout=PATIENCE_S) for ask in (httpx.get, httpx.head, httpx.post))


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_official_client_completes(client):
    reply = client.completions.create(model="fake", prompt=UNICODE, max_tokens=100, logprobs=1)
    assert reply.choices[0].text == UNICODE
    assert reply.usage.completion_tokens == len(reply.choices[0].logprobs.tokens)
    chunks = list(client.completions.create(model="fake", prompt=UNICODE, max_tokens=100, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == UNICODE


def test_the_doctor_takes_a_server_that_holds_the_port_for_no_fault(url):
    found = port_check(httpx.URL(url).port)
    assert (found.status, "an engine serves" in found.detail) == ("warn", True)


def test_the_official_client_chats(client):
    messages = [{"role": "user", "content": UNICODE}]
    reply = client.chat.completions.create(model="fake", messages=messages, logprobs=True, top_logprobs=2)
    whole = reply.choices[0].message.content
    assert whole == f"<user>{UNICODE}<assistant>"
    assert len(reply.choices[0].logprobs.content) == reply.usage.completion_tokens
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(model="fake", messages=messages, stream=True, stream_options=options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage == reply.usage


def test_the_official_client_may_send_an_answer_back(client):
    messages = [{"role": "user", "content": "hi"}]
    reply = client.chat.completions.create(model="fake", messages=messages)
    client.chat.completions.create(model="fake", messages=[*messages, reply.choices[0].message.model_dump()])


def test_the_official_client_sees_the_models_and_typed_errors(client):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.completions.create(model="fake", prompt="x", top_p=3)


def test_a_dropped_connection_aborts(folder, log):
    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "seed": HELD}
    with started(folder) as (_, url):
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=PATIENCE_S) as response:
            next(response.iter_bytes())
        host, port = url.removeprefix("http://").split(":")
        asked = json.dumps(body).encode()
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(asked), asked))
            wait_until(lambda: log.read_text().count("submit") == 2)
        wait_until(lambda: log.read_text().count("abort") == 2)


def test_an_error_in_a_stream_reaches_the_official_client(client):
    stream = client.completions.create(model="fake", prompt="a b c", stream=True, seed=FAIL)
    with pytest.raises(openai.APIError, match="NaN"):
        list(stream)


def test_engine_chat_talks_to_a_server(url):
    partner = ServerPartner(f"{url}/v1/", None, {"max_tokens": 50, "stop": ("stant",)})
    assert "".join(partner.reply([{"role": "user", "content": UNICODE}])) == f"<user>{UNICODE}<assi"
    with pytest.raises(EnginError, match=r"answers 404.*'other' is not served"):
        ServerPartner(url, "other", {})


def test_routes_of_an_unknown_plugin_end_the_start(folder):
    code = (
        "from enginery.config.schema import EngineOptions\n"
        "from enginery.plugin.registry import Registry\n"
        "from enginery.serve.server import ServeSettings, serve\n"
        "from enginery.serve.start_display import StartDisplay\n"
        f"settings = ServeSettings(port=0, routes=('absent',), engine_command={COMMAND!r})\n"
        f"serve(EngineOptions(model={str(folder)!r}), Registry.load(no_plugins=True), settings, StartDisplay())\n"
    )
    done = quick_processes.run_python("-c", code, capture_output=True, text=True, timeout=150, check=False)
    assert "PluginError" in done.stderr
    assert "absent" in done.stderr


def test_garbage_on_the_port_hurts_nobody(url):
    host, port = url.removeprefix("http://").split(":")
    for garbage in (
        b"\x16\x03\x01\x00\xff",
        b"GET /" + b"x" * 200_000,
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ):
        with socket.create_connection((host, int(port))) as raw, contextlib.suppress(OSError):
            raw.sendall(garbage)
            raw.settimeout(0.2)
            raw.recv(100)
    assert get(f"{url}/health").json() == {"status": "ready"}


def test_a_compressed_or_empty_body_is_told_apart_from_broken_json(url):
    zipped = post(f"{url}/v1/completions", content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert (zipped.status_code, "Content-Encoding 'gzip'" in zipped.json()["error"]["message"]) == (400, True)
    assert "the body is empty" in post(f"{url}/v1/completions").text


def test_probes_and_models_answer_head_like_get_without_a_body(url):
    for path in ("/health", "/health/live", "/v1/models", "/metrics"):
        asked, told = head(url + path), get(url + path)
        assert (asked.status_code, asked.content) == (200, b"")
        assert asked.headers["content-type"] == told.headers["content-type"]
    assert head(f"{url}/v1/completions").status_code == 405


def test_a_body_of_two_lengths_is_refused_and_the_connection_closed(url):
    host, port = url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
        raw.sendall(head + b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b"".join(iter(lambda: raw.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"not both" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


def test_the_schema_names_the_fields(url):
    document = get(f"{url}/openapi.json").json()
    schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/CompletionRequest"}
    assert {"prompt", "ignore_eos", "min_p"} <= document["components"]["schemas"]["CompletionRequest"]["properties"].keys()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_in_order(folder, number):
    with started(folder) as (process, _):
        child = child_of(process)
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, out, err) == (0, "", "")
        assert not is_running(child)


def test_a_running_request_is_finished_before_the_end(folder, log):
    with started(folder, drain_s=600) as (process, url):
        body = {"prompt": "a b c d e f g h", "seed": HELD, "max_tokens": 100}
        replies = []
        thread = threading.Thread(target=lambda: replies.append(post(f"{url}/v1/completions", json=body)))
        thread.start()
        wait_until(log.read_text)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_stopping(url))
        log.with_name("go").touch()
        thread.join()
        assert replies[0].json()["choices"][0]["text"] == "a b c d e f g h"
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(("drain_s", "num_signals"), [(0.5, 1), (0, 1), (600, 2)])
def test_clients_that_outlast_the_drain_are_told_why(folder, log, drain_s, num_signals):
    body = {"prompt": "a", "seed": HELD, "max_tokens": 500, "ignore_eos": True}
    whole, streamed = [], []

    def stream(url):
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=PATIENCE_S) as response:
            streamed.extend(response.iter_lines())

    with started(folder, drain_s=drain_s) as (process, url):
        child = child_of(process)
        threads = [
            threading.Thread(target=lambda: whole.append(post(f"{url}/v1/completions", json=body))),
            threading.Thread(target=stream, args=(url,)),
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: log.read_text().count("submit") == 2)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        if num_signals == 2:
            wait_until(lambda: is_stopping(url))
            process.send_signal(signal.SIGINT)
        for thread in threads:
            thread.join()
        assert min(drain_s, 0.5) * (num_signals == 1) <= time.monotonic() - began
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "")
    assert ["POST /v1/completions status=" in line for line in err.splitlines()] == [True, True]
    assert not is_running(child)
    error = whole[0].json()["error"]
    assert (whole[0].status_code, error["code"], error["type"]) == (503, "shutting_down", "unavailable_error")
    assert "shutting down" in error["message"]
    *_, last_event, done = [line.removeprefix("data: ") for line in streamed if line]
    assert (json.loads(last_event), done) == ({"error": error}, "[DONE]")


def test_while_draining_new_requests_are_refused(folder, log):
    running = {"prompt": "a", "seed": HELD, "max_tokens": 50, "ignore_eos": True, "stream": True}
    with started(folder, drain_s=600) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=running, timeout=PATIENCE_S) as response:
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: is_stopping(url))
            refused = post(f"{url}/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert refused.headers["retry-after"] == "1"
            log.with_name("go").touch()
            response.read()
        assert '"finish_reason":"length"' in response.text
        assert process.wait(PATIENCE_S) == 0


def test_a_killed_engine_ends_the_server_with_the_cause_last(folder, monkeypatch):
    monkeypatch.setenv("FAKE_NOISE", "loading this\nloading that\n")
    with started(folder) as (process, url), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        assert client.get("/health").status_code == 200
        os.kill(child_of(process), signal.SIGKILL)
        wait_until(lambda: client.get("/health").status_code == 503)  # before the server is gone too, in a second
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        noise, cause = (
            err.index("loading this\nloading that\n"),
            "engine: the engine's process was killed by SIGKILL, as the kernel",
        )
        assert err.strip().splitlines()[-1].startswith(cause)
        assert (err.count("loading this"), noise < err.index(cause)) == (1, True)


def test_a_killed_server_leaves_no_engine(folder):
    with started(folder) as (process, _):
        child = child_of(process)
        process.kill()
        process.wait()
        wait_until_gone(child)


def test_a_failed_start_has_the_child_s_words_and_exit_code(folder):
    done = subprocess.run(
        [sys.executable, SERVER, str(folder), "0", "broken"], capture_output=True, text=True, timeout=150, check=False
    )
    assert (done.returncode, done.stderr) == (2, "engine: the weights are gone; fetch them again\n")


def test_a_taken_port_is_told_before_anything_is_loaded(folder, monkeypatch):
    monkeypatch.setenv("FAKE_LOAD_S", "600")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, SERVER, str(folder), str(port)], capture_output=True, text=True, timeout=150, check=False
        )
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_told_before_what_takes_seconds_to_import():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-X", "importtime", "-m", "enginery", "serve", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert (done.returncode, done.stderr.splitlines()[-1].startswith(f"engine: port {port} of 127.0.0.1 cannot")) == (2, True)
    assert "enginery.serve.http.listening" in imported
    assert {name for name in imported if name.startswith(("uvicorn", "fastapi", "zmq", "jinja2", "enginery_"))} == set()


def test_while_loading_health_says_so(folder, monkeypatch):
    monkeypatch.setenv("FAKE_LOAD_S", "600")
    with subprocess.Popen([sys.executable, SERVER, str(folder), "0"]) as process:
        try:
            listening = psutil.Process(process.pid).net_connections
            wait_until(lambda: listening("tcp"))
            url = f"http://127.0.0.1:{listening('tcp')[0].laddr.port}"
            response = get(f"{url}/health")
            assert (response.status_code, response.json()) == (503, {"status": "loading"})
            refused = post(f"{url}/v1/completions", content=json.dumps({"prompt": "x"}))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
