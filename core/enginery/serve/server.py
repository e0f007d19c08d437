"""One server from start to end: port, engine's process, HTTP, signals."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import uvicorn
from fastapi import APIRouter

from enginery.config.checkpoint_folder import find_folder
from enginery.config.schema import EngineOptions
from enginery.errors import ConfigError
from enginery.plugin.registry import Registry
from enginery.serve.app import build_app
from enginery.serve.engine_client import ENGINE_COMMAND, EngineClient
from enginery.serve.faults import ShuttingDown
from enginery.serve.served_model import ServedModel
from enginery.serve.service import Service
from enginery.text.text_side import TextSide

_LAST_ANSWERS_S: Final = 1
_KEEP_ALIVE_S: Final = 75


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The server's section. drain_s: how long running requests may go on after a signal. routes: plugins whose routes are added."""

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 5.0
    use_generation_config: bool = True
    routes: tuple[str, ...] = ()
    engine_command: Sequence[str] = ENGINE_COMMAND


def serve(options: EngineOptions, registry: Registry, settings: ServeSettings) -> None:
    """Serve until a signal. Raises `ConfigError` for a port that is taken, before anything is loaded, and `EngineDied`."""
    with contextlib.closing(bind(settings.host, settings.port)) as listener:
        asyncio.run(_serve(options, registry, settings, listener))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `ConfigError`."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--host {host} is no address of this machine: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(f"port {port} of {host} cannot be used: {error.strerror}; choose another with --port") from error
    return listener


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers; this module has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(options: EngineOptions, registry: Registry, settings: ServeSettings, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    text = await asyncio.to_thread(_text_side, options, registry, settings)
    engine = await EngineClient.start(options, registry.manifest, command=settings.engine_command)
    service = Service(engine=engine, loaded=loop.create_future())
    try:
        routes = APIRouter()
        registry.register_routes(settings.routes, routes, engine)
        http = _http(service, routes)
        stopping, hurrying = _signals()
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        starting = asyncio.create_task(_start(service, registry, text, listener))
        await asyncio.wait((starting, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and starting.exception() is None:
            await asyncio.wait((engine.died, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            if engine.died.done():
                await asyncio.sleep(_LAST_ANSWERS_S)
        if stopping.done():
            await _drain(http, engine, hurrying, drain_s=settings.drain_s)
        http.should_exit = True
        starting.cancel()
        await asyncio.gather(serving, starting, return_exceptions=True)
        if starting.done() and not starting.cancelled():
            starting.result()
        if engine.died.done() and not stopping.done():
            raise engine.death()
    finally:
        await engine.stop()
        text.template.close()


async def _drain(http: _Http, engine: EngineClient, hurrying: asyncio.Future[None], *, drain_s: float) -> None:
    """Let open requests end, until the time is up or there is a hurry; then fail what is left, so that every client is told."""
    engine.is_stopping = True
    if open_requests := set(http.server_state.tasks):
        ending = asyncio.create_task(asyncio.wait(open_requests))
        await asyncio.wait((ending, hurrying, engine.died), timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
    engine.fail_requests(ShuttingDown)


def _http(service: Service, routes: APIRouter) -> _Http:
    config = uvicorn.Config(
        build_app(service, plugin_routes=routes),
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
        server_header=False,
    )
    return _Http(config)


def _signals() -> tuple[asyncio.Future[None], asyncio.Future[None]]:
    """Done at the first SIGINT or SIGTERM, and at the second, which does not wait for running requests."""
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[None] = loop.create_future()
    hurrying: asyncio.Future[None] = loop.create_future()

    def stop() -> None:
        if not stopping.done():
            stopping.set_result(None)
        elif not hurrying.done():
            hurrying.set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    return stopping, hurrying


def _text_side(options: EngineOptions, registry: Registry, settings: ServeSettings) -> TextSide:
    """Read here and now, so that a missing tokenizer is said before the weights are read."""
    model = registry.default_checkpoint().name if options.model is None else options.model
    return TextSide.load(find_folder(model, registry), use_generation_config=settings.use_generation_config)


async def _start(service: Service, registry: Registry, text: TextSide, listener: socket.socket) -> None:
    facts = await service.engine.ready(registry.manifest.digest())
    service.loaded.set_result(ServedModel(facts=facts, text=text))
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    for setting, value, reason in facts.decisions:
        print(f"{setting} {value}: {reason}")
    if facts.phases_s:
        print("loaded in " + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in facts.phases_s.items()))
    body = f'{{"model": "{facts.model_name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    print(f"ready: {facts.model_name} at {url}, up to {facts.max_model_len:,} tokens of context")
    print(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)
