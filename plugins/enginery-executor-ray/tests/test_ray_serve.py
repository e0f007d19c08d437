"""The application for Ray Serve: two engines, one killed under load; and how many there are to be."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from enginery.testing.fixtures import TINY_CONFIG, write_tiny_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")]  # Ray's own
PORT = 8123
NUM_TOKENS = 1000  # seconds
FLAGS = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "num_pages": "1024", "num_threads": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model"), {**TINY_CONFIG, "max_position_embeddings": 2048})


@pytest.fixture(scope="module")
def url(cluster: None, model: Path) -> Iterator[str]:
    from ray import serve

    from enginery_executor_ray.serving import application

    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(application({**FLAGS, "model": str(model), "min_replicas": "2", "max_model_len": "1100"}), name="engines")
    yield f"http://127.0.0.1:{PORT}"
    serve.shutdown()


def servers(length: int = 1100) -> list[psutil.Process]:
    """The processes of `engine serve` with that context, each a child of its replica."""
    own = {"enginery", "serve", "--port=0", f"--max-model-len={length}"}
    return [process for process in psutil.process_iter(["cmdline"]) if own <= set(process.info["cmdline"] or ())]


class Stream(NamedTuple):
    """What came of one: its text, whether it came to its end, and who answered."""

    text: str
    is_whole: bool


def stream(url: str, prompt: list[int], begun: threading.Event | None = None) -> Stream:
    asked = {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    text, is_whole = "", False
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60, trust_env=False) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if begun is not None:
                    begun.set()
                is_whole |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    text += "".join(choice["text"] for choice in json.loads(line[6:]).get("choices", ()))
    except httpx.HTTPError:
        is_whole = False
    return Stream(text, is_whole)


def served_by(url: str) -> dict[int, float]:
    """How many requests each engine has had, by process."""
    found = {}
    for server in servers():
        (port,) = {at.laddr.port for at in server.net_connections("tcp") if at.status == psutil.CONN_LISTEN}
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=20, trust_env=False).text
        found[server.pid] = sum(
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running")
        )
    return found


def test_an_engine_that_is_killed_under_load_takes_its_own_streams_alone(url: str) -> None:
    """Then there are two again."""
    prompts = [[11 * (index + 1)] * 12 for index in range(8)]  # with nothing in common
    alone = [stream(url, prompt) for prompt in prompts]
    assert all(found.is_whole for found in alone)
    begun = [threading.Event() for _ in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        results = [threads.submit(stream, url, prompt, event) for prompt, event in zip(prompts, begun, strict=True)]
        assert all(event.wait(30) for event in begun)
        running = served_by(url)
        assert len(running) == 2
        assert all(running.values()), running
        victim = max(running, key=running.__getitem__)
        psutil.Process(victim).kill()
        streams = [result.result() for result in results]
        later = stream(url, [1, 2, 3])
    lost = [found for found in streams if not found.is_whole]
    assert 0 < len(lost) <= running[victim]
    for found, expected in zip(streams, alone, strict=True):
        assert found == expected or (found in lost and expected.text.startswith(found.text))
    assert later.is_whole
    end_s = time.monotonic() + 60
    while len(servers()) < 2 or victim in {server.pid for server in servers()}:
        assert time.monotonic() < end_s
        time.sleep(0.2)
    assert stream(url, prompts[0]) == alone[0]


def test_load_brings_a_second_engine(url: str, model: Path) -> None:
    """By what the first one tells of its running requests: four, where two are meant for one. Each has a GPU, as Ray counts."""
    from ray import serve

    from enginery_executor_ray.serving import application

    given = {"model": str(model), "target_requests": "2", "max_replicas": "2", "upscale_delay_s": "1", "gpus": "1"}
    serve.run(application({**FLAGS, **given, "max_model_len": "1050"}), name="scaled", route_prefix="/scaled")
    stop = threading.Event()

    def load(index: int) -> None:
        while not stop.is_set():
            stream(f"{url}/scaled", [11 * (index + 1)] * 12)

    with ThreadPoolExecutor(4) as threads:
        loads = [threads.submit(load, index) for index in range(4)]
        try:
            end_s = time.monotonic() + 100
            while serve.status().applications["scaled"].deployments["Engine"].replica_states.get("RUNNING", 0) < 2:
                assert time.monotonic() < end_s
                assert not any(each.done() for each in loads)
                time.sleep(0.5)
            gpus = [server.environ()["CUDA_VISIBLE_DEVICES"] for server in servers(1050)]
            assert len(set(gpus)) == len(gpus) == 2
        finally:
            stop.set()
    serve.delete("scaled")


def test_whatever_the_server_has_is_there(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        assert http.get("/v1/models").json()["data"]
        assert http.get("/nowhere").status_code == 404
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        refused = http.post("/v1/chat/completions", json=chat | {"temperature": -1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
        assert http.post("/v1/completions", content=b"no JSON").status_code == 400


def raw_answer(url: str, target: bytes, *headers: bytes) -> tuple[int, bytes]:
    """Of a GET that is sent as it is: no library has changed its path."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        lines = [b"GET " + target + b" HTTP/1.1", b"Host: engines", b"Connection: close", *headers]
        connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n")
        answer = connection.makefile("rb").read()
    return int(answer.split()[1]), answer


@pytest.mark.parametrize("target", [b"//anything/v1/models", b"/x/../v1/models", b"/v1/models%2F", b"/v1/%252e%252e/models"])
def test_a_path_reaches_the_engine_as_it_was_asked_for(target: bytes, url: str) -> None:
    """Through Ray it is what the engine itself says: a library that tidied it would find `/v1/models`."""
    own_port = next(at.laddr.port for at in servers()[0].net_connections("tcp") if at.status == psutil.CONN_LISTEN)
    assert raw_answer(f"http://127.0.0.1:{own_port}", target)[0] == raw_answer(url, target)[0] == 404
    assert raw_answer(url, b"/v1/models?" + target)[0] == 200


def test_a_header_that_is_not_ascii_reaches_the_engine(url: str) -> None:
    status, answer = raw_answer(url, b"/v1/models", b"X-Name: J\xf6rg", b"X-Request-ID: named")
    assert status == 200, answer
    assert b"x-request-id: named" in answer.lower()


def test_json_that_is_nested_too_deeply_is_refused_in_the_engine_s_words(url: str) -> None:
    body = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    refused = httpx.post(f"{url}/v1/completions", content=body, timeout=60, trust_env=False)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


def test_an_engine_has_no_key_and_ends_with_its_replica(url: str) -> None:
    """Ray itself has a key in its environment, as `cluster` says. What kills the replica leaves it no time to do anything."""
    assert httpx.get(f"{url}/metrics", timeout=60, trust_env=False).status_code == 200
    victim = servers()[0]
    children = victim.children(recursive=True)
    assert children
    assert "enginery_executor_ray.tied" in victim.cmdline(), "some versions of Ray do not end what a replica started"
    victim.parent().kill()
    assert not psutil.wait_procs([victim, *children], timeout=20)[1]
    end_s = time.monotonic() + 60
    while len(servers()) < 2:
        assert time.monotonic() < end_s
        time.sleep(0.2)


@pytest.mark.usefixtures("with_ray")
@pytest.mark.parametrize(
    ("cause", "expected", "told"),
    [("EngineEnded", 503, "no engine answers"), ("NotHTTP", 400, "a newline"), ("KeyError", 500, "the log of Front tells why")],
)
def test_another_engine_is_asked_where_one_has_ended_and_for_nothing_else(cause: str, expected: int, told: str) -> None:
    import ray

    from enginery_executor_ray import serving

    error = getattr(serving, cause, KeyError)("a newline")
    asked: list[object] = []

    async def answer(request: object) -> AsyncIterator[object]:
        asked.append(request)
        raise ray.exceptions.RayTaskError("answer", "a traceback", error, proctitle="p", pid=1, ip="127.0.0.1")
        yield

    response = fronted(answer)
    assert response.status_code == expected
    assert told in json.loads(response.body)["error"]["message"]
    assert len(asked) == (3 if expected == 503 else 1)


@pytest.mark.usefixtures("with_ray")
def test_headers_of_an_answer_come_as_the_engine_gave_them() -> None:
    headers = [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=\xf6")]

    async def answer(_: object) -> AsyncIterator[object]:
        yield 204, headers

    response = fronted(answer)
    assert (response.status_code, response.raw_headers) == (204, headers)


def fronted(answer: Callable[[object], AsyncIterator[object]]) -> Any:
    """What `Front` makes of a request, where that answers in place of a replica."""
    from enginery_executor_ray import serving

    handle = SimpleNamespace(options=lambda stream: SimpleNamespace(answer=SimpleNamespace(remote=answer)))
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}
    return asyncio.run(serving.Front.func_or_class(handle)(serving.Request(scope, receive=nothing_more)))


async def nothing_more() -> dict[str, object]:
    return {"type": "http.request", "body": b"", "more_body": False}


@pytest.mark.usefixtures("with_ray")
@pytest.mark.parametrize(
    ("raw", "prefix", "query", "target"),
    [
        (b"/scaled/v1/models", "/scaled", b"", b"/v1/models"),
        (b"/sc%61led//v1%252F", "/scaled", b"a=%2f", b"//v1%252F?a=%2f"),
        (b"/scaled", "/scaled", b"", b"/"),
        (b"/x/../v1/models", "", b"", b"/x/../v1/models"),
        (None, "/scaled", b"", b"/v1/a%20b"),
    ],
)
def test_the_prefix_of_the_application_is_left_out_and_nothing_else(
    raw: bytes | None, prefix: str, query: bytes, target: bytes
) -> None:
    from enginery_executor_ray.serving import target_of

    assert target_of({"root_path": prefix, "raw_path": raw, "path": "/scaled/v1/a b", "query_string": query}) == target


@pytest.mark.usefixtures("with_ray")
def test_equal_beginnings_look_alike_to_the_router() -> None:
    from enginery_executor_ray.serving import prompt_of

    long = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    first, second = (prompt_of(json.dumps({"model": "m", "messages": long[:count]}).encode()) for count in (1, 2))
    assert second.startswith(first[:-1])
    assert prompt_of(b'{"prompt": "hello"}') == "hello"
    assert [prompt_of(body) for body in (b"", b"no JSON", b"[1]", b"{}")] == [""] * 4
    assert prompt_of(b"[" * 100_000) == prompt_of(b'{"prompt": ' + b"[" * 100_000) == ""


@pytest.mark.usefixtures("with_ray")
@pytest.mark.parametrize(
    ("running", "waiting", "usage", "expected"),
    [
        ([10.0, 12.0], [0.0, 0.0], [0.2, 0.3], 1),
        ([64.0, 64.0], [0.0, 30.0], [0.2, 0.3], 3),
        ([8.0, 8.0], [1.0, 2.0], [0.99, 0.98], 3),
        ([8.0, 8.0], [1.0, 2.0], [0.99, 0.30], 1),
        ([64.0, 64.0], [900.0, 30.0], [0.2, 0.3], 4),
        ([], [], [], 2),
    ],
)
def test_engines_are_as_many_as_their_metrics_ask_for(
    running: list[float], waiting: list[float], usage: list[float], expected: int
) -> None:
    from enginery_executor_ray.serving import num_replicas

    named = {"running": running, "waiting": waiting, "kv_usage": usage}
    context = SimpleNamespace(
        aggregated_metrics={name: {str(index): value for index, value in enumerate(values)} for name, values in named.items()},
        current_num_replicas=2,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
        config=SimpleNamespace(target_ongoing_requests=64),
    )
    assert num_replicas(context) == (expected, {})


@pytest.mark.usefixtures("with_ray")
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"port": "1", "api_key": "k"}, "api_key, port: Ray Serve listens"),
        ({"ssl_certfile": "a", "ssl-keyfile": "b"}, "ssl_certfile, ssl_keyfile: Ray Serve listens"),
        ({"min_replicas": "x"}, "min_replicas is 'x', but must be a whole number from 1 on"),
        ({"min_replicas": "0"}, "min_replicas is '0', but must be a whole number from 1 on"),
        ({"target_requests": 0}, "target_requests is 0, but must be a whole number from 1 on"),
        ({"gpus": "-1"}, "gpus is '-1', but must be a whole number from 0 on"),
        ({"min_replicas": "3", "max_replicas": "2"}, "max_replicas is 2, but min_replicas 3"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(given: dict[str, object], told: str) -> None:
    """No engine at all would never be more, as it is engines that tell how many there are to be."""
    from enginery_executor_ray.serving import application

    with pytest.raises(ValueError, match=told):
        application({"model": "m", **given})


@pytest.mark.usefixtures("with_ray")
def test_metrics_that_are_refused_are_not_none_at_all() -> None:
    """Ray would think that nobody asks anything of this engine, and end it."""
    from enginery_executor_ray.serving import Engine

    engine = SimpleNamespace(_client=httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(refuse)))
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        asyncio.run(Engine.record_autoscaling_stats(engine))


def refuse(_: httpx.Request) -> httpx.Response:
    return httpx.Response(401)


@pytest.mark.usefixtures("cluster")
def test_a_server_that_does_not_begin_is_told_with_its_last_lines(capfd: pytest.CaptureFixture[str]) -> None:
    """`serve status` has them then, and Ray's log of the replica all."""
    from enginery_executor_ray.serving import Engine

    with pytest.raises(RuntimeError, match=r"ended with status 2; its last lines were:\n.*no option --min-replica"):
        Engine({"min_replica": "2"})
    assert "no option --min-replica" in capfd.readouterr().err
