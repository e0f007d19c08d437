"""One server from start to end: port, engine's process, HTTP, signals."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import h11
import uvicorn
from fastapi import APIRouter
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match
from starlette.types import ASGIApp

from enginery.checkpoint.folder import find_folder, find_tokenizer_folder
from enginery.child_process import take
from enginery.config.schema import EngineOptions
from enginery.engine.process_age import phases_text, process_age_s
from enginery.plugin.records import PluginRecord
from enginery.plugin.registry import Registry
from enginery.serve.api.answer_parsers import Parsers
from enginery.serve.api.operator_routes import administration
from enginery.serve.api.served_model import ServedModel
from enginery.serve.api.service import Service
from enginery.serve.app import build_app, owners_of
from enginery.serve.engine.client import EngineClient
from enginery.serve.engine.progress import watch
from enginery.serve.engine.replica_options import replica_options
from enginery.serve.engine.replicas import Replicas
from enginery.serve.http.access import AccessLog
from enginery.serve.http.connection import CROWDED, LimitedConfig, refusal_of
from enginery.serve.http.faults import ShuttingDown
from enginery.serve.http.framing import Framing
from enginery.serve.http.keys import KeyGuard, Keys
from enginery.serve.http.listening import Listener, bind, is_loopback
from enginery.serve.http.logs import configure
from enginery.serve.http.traces import Tracer
from enginery.serve.settings import ServeSettings
from enginery.serve.start_display import Served, StartDisplay, chosen_line, summary
from enginery.text.text_side import TextSide

_LAST_ANSWERS_S: Final = 1
_SHOW_S: Final = 0.2
_KEEP_ALIVE_S: Final = 75
_log: Final = logging.getLogger(__name__)


def serve(options: EngineOptions, registry: Registry, settings: ServeSettings, display: StartDisplay) -> None:
    """Serve until a signal. Raises `ConfigError` for a port that is taken, before anything is loaded, and `EngineDied`.

    display: it is closed when the server is ready. To be called inside `in_background`: the log is written for ever.
    """
    refusal = b"" if settings.ssl_certfile else refusal_of(h11.Connection(h11.SERVER), *CROWDED)
    listener = bind(settings.host, settings.port, num_connections=settings.limits.num_connections, refusal=refusal)
    with contextlib.closing(listener):
        asyncio.run(_serve(options, registry, settings, listener, display=display))


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers; this module has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    options: EngineOptions, registry: Registry, settings: ServeSettings, listener: Listener, *, display: StartDisplay
) -> None:
    loop = asyncio.get_running_loop()
    front_s = process_age_s()
    relay = configure(settings.log_format, settings.log_level)
    _warn(settings, listener)
    tracer = Tracer.open(settings.otlp_endpoint)
    text, parsers = _text_side(options, registry, settings, display)  # on no thread: Ctrl-C would wait for its download
    text_s = process_age_s() - front_s
    stopping, hurrying = _signals()  # before there is a process to end
    engine = await _engines(options, registry, settings, relay)
    service = Service(
        engine=engine,
        loaded=loop.create_future(),
        watchdog_s=settings.watchdog_s,
        shown=settings.shown(),
        max_body_bytes=settings.max_body_bytes,
        max_total_body_bytes=settings.max_total_body_bytes,
    )
    engine.is_back = service.renew
    watching = asyncio.create_task(watch(engine.replicas, settings.watchdog_s))
    try:
        routes = APIRouter()
        added = registry.register_routes(settings.routes, routes, engine)
        service.chosen.extend((*parsers.decisions, *_route_decisions(added, settings)))
        if settings.admin_keys:
            routes.include_router(administration(service, Keys(settings.admin_keys)))
        app = build_app(service, plugin_routes=routes, owners=owners_of(added))
        http = _http(_guarded(app, service, settings, tracer), settings, listener)
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        served = Served(
            url=_url(listener, settings),
            has_page=_has_page(routes),
            has_key=bool(settings.api_keys),
            chats=text.template.source is not None,
            num_engines=settings.dp,
            num_ranks=options.num_ranks,
        )
        ready = _Announcement(served=served, phases_s={"server": front_s, "text": text_s}, display=display)
        starting = asyncio.create_task(_start(service, registry, text, ready, parsers=parsers))
        await asyncio.wait((starting, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and starting.exception() is None:
            await _until_it_ends(engine, stopping, serving)
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
        watching.cancel()
        await engine.stop()
        text.template.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


async def _engines(options: EngineOptions, registry: Registry, settings: ServeSettings, relay: Callable[[str], None]) -> Replicas:
    """Loading, with what they write to stderr going to `relay`."""
    level = settings.log_level.upper()
    begin = functools.partial(take, settings.begun, settings.engine_command)
    start = functools.partial(EngineClient.start, begin=begin, relay=relay)
    every = replica_options(options, settings.dp, registry)
    starts = [functools.partial(start, each, registry.manifest, log_level=level, share=share) for each, share in every]
    return await Replicas.start(*starts, restarts=settings.restarts)


async def _until_it_ends(engine: Replicas, stopping: asyncio.Future[None], serving: asyncio.Task[None]) -> None:
    """Wait for a signal, or the end of the engine or of HTTP. If the engine has died, its requests get a moment to be told."""
    await asyncio.wait((engine.died, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
    if engine.died.done():
        await asyncio.sleep(_LAST_ANSWERS_S)


async def _drain(http: _Http, engine: Replicas, hurrying: asyncio.Future[None], *, drain_s: float) -> None:
    """Let open requests end, until the time is up or there is a hurry; then fail what is left, so that every client is told."""
    engine.refuse()
    if open_requests := set(http.server_state.tasks):
        ending = asyncio.create_task(asyncio.wait(open_requests))
        await asyncio.wait((ending, hurrying, engine.died), timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
    engine.fail_requests(ShuttingDown)


def _guarded(app: ASGIApp, service: Service, settings: ServeSettings, tracer: Tracer | None) -> ASGIApp:
    """The application behind its middleware. A request meets the log first, then framing, then origins, then keys."""
    if settings.api_keys:
        app = KeyGuard(app, Keys(settings.api_keys + settings.admin_keys))
    if settings.allow_origins:
        app = CORSMiddleware(app, allow_origins=settings.allow_origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    return AccessLog(Framing(app), answered=service.answered, tracer=tracer)


def _http(app: ASGIApp, settings: ServeSettings, listener: Listener) -> _Http:
    config = LimitedConfig(
        app,
        dataclasses.replace(settings.limits, num_connections=listener.descriptors.num_connections),
        listener.refusals,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        log_config=None,  # ours is made; uvicorn's own breaks where stdout was closed
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
        server_header=False,
    )
    return _Http(config)


def _warn(settings: ServeSettings, listener: Listener) -> None:
    if not settings.api_keys and not is_loopback(listener):
        _log.warning("everybody who can reach %s may use this server, for it asks for no key; see --api-key-file", settings.host)
    fitting, wanted = listener.descriptors.num_connections, settings.limits.num_connections
    if fitting < wanted:
        limit = listener.descriptors.limit
        _log.warning("%d connections at a time, not %d, as %d files may be open; ulimit -n changes that", fitting, wanted, limit)


def _signals() -> tuple[asyncio.Future[None], asyncio.Future[None]]:
    """Done at the first SIGINT, SIGTERM or SIGHUP, and at one more of the first two, which does not wait for running requests.

    A terminal that closes sends SIGHUP more than once, and systemd one beside its SIGTERM. Under nohup it is ignored.
    """
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[None] = loop.create_future()
    hurrying: asyncio.Future[None] = loop.create_future()

    def stop(number: signal.Signals) -> None:
        if not stopping.done():
            stopping.set_result(None)
        elif not hurrying.done() and number != signal.SIGHUP:
            hurrying.set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, stop, number)
    return stopping, hurrying


def _text_side(
    options: EngineOptions, registry: Registry, settings: ServeSettings, display: StartDisplay
) -> tuple[TextSide, Parsers]:
    """Read the tokenizer, the template and the parsers before the weights, so that a missing one is told at once."""
    model = registry.default_checkpoint().name if options.model is None else options.model
    is_here = os.path.exists(os.path.expanduser(model)) or registry.checkpoint(model) is not None
    with contextlib.nullcontext() if is_here else display.aside(f"fetching {model} from the Hugging Face hub"):
        folder = find_folder(model, registry, revision=options.revision)
        tokenizer_folder = find_tokenizer_folder(options, registry, folder)
    display.show("reading the tokenizer")
    text = TextSide.load(
        folder,
        tokenizer_folder=tokenizer_folder,
        chat_template=options.chat_template,
        use_generation_config=settings.use_generation_config,
    )
    return text, Parsers.choose(registry, folder, text, tools=settings.tool_parser, reasoning=settings.reasoning_parser)


async def _start(service: Service, registry: Registry, text: TextSide, ready: _Announcement, *, parsers: Parsers) -> None:
    showing = asyncio.create_task(_show(service.engine, ready.display))
    try:
        facts = await service.engine.ready(registry.manifest.digest())
    finally:
        showing.cancel()
        ready.display.close()
    trusts = bool(service.shown["trust_request_chat_template"])
    service.loaded.set_result(ServedModel(facts=facts, text=text, parsers=parsers, trusts_templates=trusts))
    told = (*facts.decisions, *service.chosen)
    for setting, value, reason in told:
        _log.debug("%s %s: %s", setting, value, reason)
    _log.debug("loaded %s", phases_text(process_age_s(), ready.phases_s | dict(facts.phases_s)))
    print(summary(facts, ready.served, seconds=process_age_s(), parts=chosen_line(told)), flush=True)


def _route_decisions(added: Sequence[tuple[PluginRecord, APIRouter]], settings: ServeSettings) -> Iterator[tuple[str, str, str]]:
    for record, _ in added:
        why = "asked for with --route" if record.name in settings.routes else "installed for its routes alone"
        yield "routes", record.name, f"{why}, from {record}"


async def _show(engine: Replicas, display: StartDisplay) -> None:
    """Show how far the engine is, again and again. Never ends."""
    while True:
        display.show_progress(engine.loading)
        await asyncio.sleep(_SHOW_S)


@dataclass(frozen=True, kw_only=True)
class _Announcement:
    """What the end of the start tells besides the engine's facts, and the display until then."""

    served: Served
    phases_s: dict[str, float]
    display: StartDisplay


def _url(listener: socket.socket, settings: ServeSettings) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _has_page(routes: APIRouter) -> bool:
    root = {"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []}
    return any(route.matches(root)[0] is Match.FULL for route in routes.routes)
