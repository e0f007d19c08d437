"""Routes for those who run the server: probes, metrics and /server_info, and /admin, which changes it and needs its own key."""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from enginery import __version__
from enginery.contracts.engine import DraftCounts, KernelState
from enginery.errors import RequestError
from enginery.serve.api.service import Service
from enginery.serve.engine import messages
from enginery.serve.engine.client import EngineState
from enginery.serve.engine.progress import stalled_s
from enginery.serve.http.faults import Unauthorized
from enginery.serve.http.keys import Keys
from enginery.serve.http.metrics import EngineNow, by_engine, families

_MAX_PROFILED_STEPS: Final = 10_000
_SECRET: Final = re.compile("key|token|secret|password|credential", re.IGNORECASE)


class _Metrics(Collector):
    """Makes the metrics whenever they are read."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> list[Metric]:
        """All metrics of this moment; prometheus_client calls it."""
        engine, is_loaded = self._service.engine, self._service.loaded.done()
        engines = [
            EngineNow(replica.facts, replica.client.stats, replica.client.meter, replica.num_restarts)
            for replica in engine.replicas
            if is_loaded and replica.facts is not None
        ]
        return [
            *families(engines, engine.manifest, self._service.answered),
            *by_engine([_process(client.child.pid) for client in engine.clients]),
        ]


def _process(pid: int) -> list[Metric]:
    """Memory, descriptors and processor time of an engine's process."""
    return list(ProcessCollector(namespace="enginery_engine", pid=lambda: pid, registry=None).collect())


def operations(service: Service) -> APIRouter:
    """The routes for everybody who has a key. The probes are for everybody."""
    routes = APIRouter()
    registry = CollectorRegistry()
    registry.register(_Metrics(service))
    ProcessCollector(registry=registry)

    @routes.get("/health/live")
    async def live() -> Response:
        """200 as long as this process answers."""
        return JSONResponse({"status": "live"})

    @routes.get("/health", name="health")
    @routes.get("/health/ready")
    async def ready() -> Response:
        """200 only when requests are served."""
        status, is_ready = str(service.state), service.state is EngineState.READY
        if is_ready and not await service.model().can_render():
            status, is_ready = "template_stuck", False
        return JSONResponse({"status": status} | _apart(service), status_code=200 if is_ready else 503)

    @routes.get("/health/progress")
    async def progress() -> Response:
        """503 when all engines are dead, silent or have work and end no step. While a model loads, or does again: how far it is."""
        engine = service.engine
        if service.state in (EngineState.LOADING, EngineState.RESTARTING):
            return JSONResponse({"status": service.state} | dataclasses.asdict(engine.loading))
        stalled = {replica: stalled_s(replica) for replica in engine.replicas}
        left = [replica for replica in engine.replicas if not replica.state.is_down]
        is_stuck = all(stalled[replica] >= service.watchdog_s for replica in left)
        status = {
            "status": "stuck" if is_stuck else "moving" if any(client.meter.num_open for client in engine.clients) else "idle",
            "stalled_s": round(max(stalled.values()), 3),
            "attention_backend": engine.stats.attn_backend,
            "kernels": _kernels(engine.stats.kernels),
            "speculation": _speculation(engine.stats.drafts),
        }
        return JSONResponse(status | _apart(service), status_code=503 if is_stuck else 200)

    @routes.get("/metrics")
    async def metrics() -> Response:
        """All metrics, in Prometheus' text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/server_info")
    async def server_info() -> Response:
        """The version, settings, plugins and counters of the server, and why each setting has its value."""
        return JSONResponse(_server_info(service))

    return routes


def _kernels(state: KernelState) -> dict[str, object]:
    """The state of the attention kernels. While they compile beside the engine, it runs with others."""
    status = "failed" if state.failure else "compiling" if state.compiling else "compiled"
    return {"status": status, "compiling": state.compiling, "seconds": round(state.seconds, 1), "failure": state.failure or None}


def _speculation(counts: DraftCounts) -> dict[str, object]:
    """What guesses at next tokens have brought."""
    return {
        "acceptance_length": round(counts.acceptance_length, 2),
        "drafted_tokens": counts.drafted,
        "accepted_tokens": counts.accepted,
    }


def _apart(service: Service) -> dict[str, object]:
    """The state of each replica; nothing where there is one, whose state is told anyway."""
    replicas = service.engine.replicas
    return {"replicas": [replica.state for replica in replicas]} if len(replicas) > 1 else {}


def administration(service: Service, keys: Keys) -> APIRouter:
    """The routes for administrators. A path that leads here in any spelling meets the same check of the key."""

    async def only_administrators(request: Request) -> None:
        if keys.which(request.scope["headers"]) is None:
            raise Unauthorized("/admin needs an administrator's key (--admin-key)")

    routes = APIRouter(prefix="/admin", dependencies=[Depends(only_administrators)])

    @routes.post("/flush_prefix_cache")
    async def flush() -> Response:
        """Free the cached pages that no request uses."""
        return JSONResponse({"told": await service.engine.order(messages.Flush())})

    @routes.post("/profile")
    async def profile(num_steps: int) -> Response:
        """Trace what the host does in the next steps, to the file of `--profile-file`."""
        if not 1 <= num_steps <= _MAX_PROFILED_STEPS:
            raise RequestError(f"num_steps is {num_steps}, but must lie between 1 and {_MAX_PROFILED_STEPS:,}", param="num_steps")
        return JSONResponse({"told": await service.engine.order(messages.Profile(num_steps))})

    @routes.post("/abort")
    async def abort(request_id: str) -> Response:
        """End a request of the engine, as the log names it; its client is told."""
        if not await service.engine.abort(request_id):
            raise RequestError(f"there is no request {request_id[:100]!r}", param="request_id")
        return JSONResponse({"told": f"{request_id} was aborted"})

    return routes


def _server_info(service: Service) -> dict[str, object]:
    engine = service.engine
    facts = service.loaded.result().facts if service.loaded.done() else None
    info: dict[str, object] = {
        "version": __version__,
        "state": service.state,
        "options": dataclasses.asdict(engine.options)
        | {"plugin_options": [_hidden(text) for text in engine.options.plugin_options]},
        "server": {**service.shown, "max_body_bytes": service.body_limits.one, "max_total_body_bytes": service.body_limits.total},
        "plugins": [dataclasses.asdict(entry) for entry in engine.manifest.plugins],
        "stats": dataclasses.asdict(engine.stats),
        "speculation": _speculation(engine.stats.drafts),
        "replicas": [
            {
                "state": replica.state,
                "num_restarts": replica.num_restarts,
                "num_pages": None if replica.facts is None else replica.facts.num_pages,
                "requests_sent": replica.client.meter.num_begun,
                "stats": dataclasses.asdict(replica.client.stats),
            }
            for replica in engine.replicas
        ],
    }
    if facts is not None:
        told = (*facts.decisions, *service.chosen)
        decisions = [{"setting": setting, "value": value, "reason": reason} for setting, value, reason in told]
        info["engine"] = dataclasses.asdict(facts) | {"decisions": decisions}
    return info


def _hidden(option: str) -> str:
    """`NAME.KEY=VALUE` without the value where the key sounds like a secret."""
    name, equals, value = option.partition("=")
    return f"{name}{equals}{'***' if _SECRET.search(name) else value}"
