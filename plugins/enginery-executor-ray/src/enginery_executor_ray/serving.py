"""An application for Ray Serve: engines behind Ray's router, as many as their own metrics ask for.

    serve run enginery_executor_ray.serving:application model=Qwen/Qwen3-0.6B tp=2 executor=ray max_replicas=4

    Ray's proxy ──> Front ── by prefix, else by load ──> Engine (replica) ──> engine serve, a process of its own on the same node

A replica runs the whole server and hands bytes through, so every endpoint and option is the server's. When it ends, Ray starts
another; requests of the other replicas do not notice. Imported by Ray's processes alone, never by an engine.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import math
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, unquote

import httpx
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from enginery_executor_ray.arguments import environ_of, number_on_node, options_of, own_and_flags

_ROUTERS: Final = (  # the first has the name that Ray promises, but some of its versions import vLLM there
    "ray.serve.llm.request_router",
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router",
)
_ROUTING: Final = {
    "imbalanced_threshold": 8,
    "do_eviction": True,
}  # requests by which loads may differ
_FULL: Final = 0.95  # of the KV pages
_HEALTH_S: Final = 2.0
_GATHER_S: Final = 0.02
_TRIES: Final = 3
_METRICS_S: Final = 2.0
_LOOK_BACK_S: Final = 10.0
_MOST_REQUESTS: Final = 100_000  # the engine has its own bounds, and says so
_LAST_LINES: Final = 12
_HOP_BY_HOP: Final = {b"connection", b"content-length", b"host", b"keep-alive", b"transfer-encoding", b"upgrade"}
_METRICS: Final = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
}
_log: Final = logging.getLogger(__name__)


Headers = list[tuple[bytes, bytes]]  # names in lower case


class EngineEnded(RuntimeError):
    """The server of this replica does not answer any more, and told nothing of a request."""


class NotHTTP(RuntimeError):
    """A request that Ray's proxy took, and that breaks the rules of HTTP."""


@dataclass(frozen=True)
class Asked:
    """A request of HTTP. target: the path and the query, as they came. prompt: what Ray's router compares with earlier requests."""

    method: str
    target: bytes
    headers: Headers
    body: bytes
    prompt: str


class Engine:
    """A replica: `engine serve` with these flags. Raises `RuntimeError` with its last lines where it does not begin."""

    def __init__(self, flags: Mapping[str, object]) -> None:
        self._is_over = False
        environ = environ_of(os.environ) | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        if events := flags.get("kv_events"):
            number, self._number = number_on_node(str(events))
            flags = {**flags, "dp_rank": int(str(flags.get("dp_rank", 0))) + number}
        tied = [sys.executable, "-P", "-m", "enginery_executor_ray.tied"]
        self._server = subprocess.Popen(
            [*tied, "enginery", "serve", "--host=127.0.0.1", "--port=0", *options_of(flags)],
            stdin=subprocess.PIPE,  # open as long as this process lives
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        assert self._server.stdout is not None
        last: deque[str] = deque(maxlen=_LAST_LINES)
        hearing = threading.Thread(target=self._pass_on_stderr, args=(last,), daemon=True)
        hearing.start()
        found = (re.search(r"at (http://[^,\s]+)", line) for line in self._server.stdout)
        if (line := next(filter(None, found), None)) is None:
            hearing.join()
            raise RuntimeError(f"engine serve ended with status {self._server.wait()}; its last lines were:\n" + "".join(last))
        threading.Thread(target=self._end_with_server, daemon=True).start()
        self._client = httpx.AsyncClient(base_url=line[1], timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None))

    async def answer(self, asked: Asked) -> AsyncIterator[object]:
        """Status and headers first, then the body as it comes. Whoever stops listening ends the request.

        What comes within `_GATHER_S` is one message: Ray needs milliseconds of a processor for each, however small. Raises
        `EngineEnded`, and `NotHTTP` for a request that cannot be passed on byte for byte.
        """
        extensions = {"target": asked.target, "timeout": httpx.Timeout(None).as_dict()}
        passed = [(name, value) for name, value in asked.headers if name not in _HOP_BY_HOP]
        request = httpx.Request(asked.method, self._client.base_url, headers=passed, content=asked.body, extensions=extensions)
        try:
            response = await self._client.send(request, stream=True)
        except httpx.LocalProtocolError as error:
            raise NotHTTP(f"this request cannot be passed on: {error}") from None
        except httpx.TransportError as error:
            raise EngineEnded(repr(error)) from None
        parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        reading = asyncio.create_task(_read(response, parts))
        try:
            told = ((name.lower(), value) for name, value in response.headers.raw)
            yield response.status_code, [(name, value) for name, value in told if name not in _HOP_BY_HOP]
            while (part := await parts.get()) is not None:
                await asyncio.sleep(_GATHER_S)
                rest = [parts.get_nowait() for _ in range(parts.qsize())]
                yield b"".join((part, *filter(None, rest)))
                if None in rest:
                    break
            await reading
        finally:
            reading.cancel()
            await response.aclose()

    async def check_health(self) -> None:
        """Raise when the server counts as stuck; Ray calls it again and again, and starts another replica then."""
        (await self._client.get("/health/progress", timeout=_HEALTH_S * 5)).raise_for_status()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Of the engine's own metrics those that `num_replicas` reads."""
        answer = await self._client.get("/metrics", timeout=_HEALTH_S)
        text = answer.raise_for_status().text  # what is not known is not nothing
        found = dict.fromkeys(_METRICS.values(), 0.0)
        for name, value in re.findall(r"^([a-z:_]+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
            if name in _METRICS:
                found[_METRICS[name]] += float(value)
        return found

    def _pass_on_stderr(self, last: deque[str]) -> None:
        """To Ray's log of this replica. last: gets its last lines."""
        assert self._server.stderr is not None
        for line in self._server.stderr:
            last.append(line)
            print(line, end="", file=sys.stderr, flush=True)

    def _end_with_server(self) -> None:
        """At once, and not when Ray looks again: until then it would send requests here."""
        assert self._server.stdout is not None
        self._server.stdout.read()
        if self._is_over:
            return
        print(f"engine serve has ended with status {self._server.wait()}, and this replica with it", file=sys.stderr, flush=True)
        os._exit(1)

    def __del__(self) -> None:
        """Ray calls it when the replica is to end."""
        self._is_over = True
        self._server.terminate()
        self._server.wait()


async def _read(response: httpx.Response, parts: asyncio.Queue[bytes | None]) -> None:
    """All of a body; None is its end, or where it breaks off."""
    try:
        async for part in response.aiter_raw():
            parts.put_nowait(part)
    finally:
        parts.put_nowait(None)


@serve.deployment(max_ongoing_requests=_MOST_REQUESTS)
class Front:
    """What Ray's proxy speaks to."""

    def __init__(self, engines: DeploymentHandle) -> None:
        self._answers = engines.options(stream=True).answer

    async def __call__(self, request: Request) -> Response:
        """Any request, to the engine that the router chooses."""
        body, target = await request.body(), target_of(request.scope)
        prompt = prompt_of(body) or target.decode("latin-1")  # Ray's router divides by its length
        asked = Asked(request.method, target, request.headers.raw, body, prompt)
        for _ in range(_TRIES):
            parts = self._answers.remote(asked)
            try:
                status, found = await anext(parts)
            except ray.exceptions.RayError as error:  # nothing was told yet
                if isinstance(error, ray.exceptions.RayTaskError) and not isinstance(error.cause, EngineEnded):
                    return _not_passed_on(error)
                _log.warning("a request goes to another engine: %s", error)
                continue
            response = StreamingResponse(parts, status_code=status)
            response.raw_headers = found
            return response
        return _problem(503, "no engine answers; try again", "overloaded_error", {"Retry-After": "1"})


def _not_passed_on(error: ray.exceptions.RayTaskError) -> Response:
    """Another engine would not do better."""
    if isinstance(error.cause, NotHTTP):
        return _problem(400, str(error.cause), "invalid_request_error")
    _log.error("a request failed on its way to an engine: %s", error)
    return _problem(500, "the request failed on its way to an engine; the log of Front tells why", "server_error")


def _problem(status: int, message: str, kind: str, headers: Mapping[str, str] | None = None) -> Response:
    problem = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return JSONResponse(problem, status_code=status, headers=headers)


def target_of(scope: Mapping[str, Any]) -> bytes:
    """What an ASGI request is for, byte for byte, without the route_prefix of this application."""
    prefix, query = scope.get("root_path", ""), scope.get("query_string", b"")
    raw = scope.get("raw_path") or quote(scope["path"]).encode()
    most = min(len(raw), 3 * len(prefix.encode()))  # each byte may be written as %xx
    end = next((end for end in range(most + 1) if unquote(raw[:end].decode("latin-1")) == prefix), 0)
    return (raw[end:] or b"/") + (b"?" + query if query else b"")


def prompt_of(body: bytes) -> str:
    """Text with the same beginning where prompts, or conversations, have the same."""
    try:
        asked = json.loads(body) if body else {}
        names = ("messages", "prompt", "input") if isinstance(asked, dict) else ()
        given = next((asked[name] for name in names if name in asked), "")
        return given if isinstance(given, str) else json.dumps(given)
    except (ValueError, RecursionError):
        return ""  # which the engine refuses in its own words


def num_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """How many engines there are to be: each with `target_requests`, and one more where requests wait for memory."""
    metrics = context.aggregated_metrics or {}
    running, waiting, usage = (list((metrics.get(name) or {}).values()) for name in ("running", "waiting", "kv_usage"))
    if not running:
        return max(context.current_num_replicas, context.capacity_adjusted_min_replicas), {}
    wanted = math.ceil((sum(running) + sum(waiting)) / context.config.target_ongoing_requests)
    if sum(waiting) > 0 and min(usage, default=0.0) > _FULL:
        wanted = max(wanted, context.current_num_replicas + 1)
    return min(max(wanted, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas), {}


def application(args: Mapping[str, object]) -> serve.Application:
    """args: options of `engine serve` by name, and of the application: min_replicas, max_replicas, target_requests (of an engine),
    upscale_delay_s and downscale_delay_s (how long as many have to be wanted), gpus (of each engine).

    Raises `ValueError` for options whose place Ray takes, and for values that cannot be.
    """
    own, flags = own_and_flags(args)
    scaling = AutoscalingConfig(
        min_replicas=own["min_replicas"],
        max_replicas=own["max_replicas"],
        initial_replicas=own["min_replicas"],
        target_ongoing_requests=own["target_requests"],
        metrics_interval_s=_METRICS_S,
        look_back_period_s=_LOOK_BACK_S,
        upscale_delay_s=own["upscale_delay_s"],
        downscale_delay_s=own["downscale_delay_s"],
        policy=AutoscalingPolicy(policy_function=num_replicas),
    )
    engines = serve.deployment(
        Engine,
        max_ongoing_requests=_MOST_REQUESTS,
        ray_actor_options={"num_gpus": own["gpus"]},
        health_check_period_s=_HEALTH_S,
        autoscaling_config=scaling,
        request_router_config=_router(),
    )
    return Front.bind(engines.bind(flags))  # type: ignore[attr-defined]


def _router() -> RequestRouterConfig:
    """Ray's by prefix, where this Ray has it."""
    for name in _ROUTERS:
        try:
            router = importlib.import_module(name).PrefixCacheAffinityRouter
            return RequestRouterConfig(request_router_class=router, request_router_kwargs=_ROUTING)
        except (ImportError, AttributeError) as error:
            _log.info("no router by prefix in %s: %s", name, error)
    _log.warning("this Ray has no router by prefix: requests go where least are open")
    return RequestRouterConfig()
