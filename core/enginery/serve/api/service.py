"""What all endpoints share: the engine's process, the model once it is ready, and the reading of bodies."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginery.contracts.engine import EngineFacts
from enginery.errors import RequestError
from enginery.serve.api.served_model import ServedModel
from enginery.serve.engine.client import EngineState
from enginery.serve.engine.replicas import Replicas
from enginery.serve.http.body_limits import BodyLimits
from enginery.serve.http.faults import NotReady, ShuttingDown
from enginery.serve.schemas.body_decoding import RequestT, decode_request

_INLINE_BYTES: Final = 64 << 10


@dataclass(kw_only=True, eq=False)
class Service:
    """What the handlers of all endpoints share. loaded: gets its result when the engine is ready; another one when it is again.

    watchdog_s: without a step for so long while there is work, the engine counts as stuck. shown: of the server's settings.
    chosen: what the front chose among plugins, and why: (setting, value, reason). answered: HTTP requests by route and status.
    max_body_bytes, max_total_body_bytes: None leaves them to the context's length.
    decoding: large bodies, one at a time: decoding holds the GIL, and several threads would pass it on among themselves.
    """

    engine: Replicas
    loaded: asyncio.Future[ServedModel]
    watchdog_s: float = 60.0
    shown: Mapping[str, object] = field(default_factory=dict)
    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    chosen: list[tuple[str, str, str]] = field(default_factory=list)
    max_body_bytes: int | None = None
    max_total_body_bytes: int | None = None
    decoding: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "decoding"))

    @property
    def state(self) -> EngineState:
        """READY only when requests are served."""
        is_loading = self.engine.state is EngineState.READY and not self.loaded.done()
        return EngineState.LOADING if is_loading else self.engine.state

    @property
    def body_limits(self) -> BodyLimits:
        """The bounds on bodies. Until the model is loaded, they are those of an empty context."""
        max_model_len = self.loaded.result().facts.max_model_len if self.loaded.done() else 0
        return BodyLimits.of(max_model_len, one=self.max_body_bytes, total=self.max_total_body_bytes)

    def renew(self, facts: EngineFacts) -> None:
        """Serve an engine that was started again: it may have other pages than the one before."""
        before, self.loaded = self.loaded.result(), asyncio.get_running_loop().create_future()
        self.loaded.set_result(dataclasses.replace(before, facts=facts))

    def model(self) -> ServedModel:
        """The model, ready to serve. Raises `EngineDied`, `EngineRestarts`, `ShuttingDown` and `NotReady` when it is not."""
        if self.engine.state.is_down:
            raise self.engine.death()
        if self.engine.state is EngineState.STOPPING:
            raise ShuttingDown
        if not self.loaded.done():
            raise NotReady("the engine is loading the model; try again in a moment")
        return self.loaded.result()


@dataclass(frozen=True, kw_only=True)
class Heading:
    """The fields that all parts of one answer begin with. created: seconds since 1970."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> Heading:
        """A heading with a new id, PREFIX-..., and the time of now. model: as the request named it."""
        return cls(id=f"{prefix}-{uuid.uuid4().hex}", created=int(time.time()), model=model)


async def read_request(http: Request, kind: type[RequestT]) -> RequestT:
    """Read and check a body. Raises `RequestError`, and what `BodyBounds` raises, before too much of a body is in memory."""
    if (encoding := http.headers.get("content-encoding", "identity")) != "identity":
        raise RequestError(f"the body has the Content-Encoding {encoding[:50]!r}; send it as it is, without one")
    body = bytearray()
    async for part in http.stream():
        body += part
    if len(body) <= _INLINE_BYTES:
        return decode_request(body, kind)
    service: Service = http.app.state.service
    return await asyncio.get_running_loop().run_in_executor(service.decoding, decode_request, body, kind)


async def large_answer(model: ServedModel, size: int, content: Callable[[], object]) -> Response:
    """`json_answer` of what `content` makes, both made `apart` where it is much. size: of log-probabilities, numbers or tokens."""
    return await model.apart(size, lambda: json_answer(content()))


def json_answer(content: object) -> Response:
    """The answer 200 with `content` as JSON, which msgspec writes."""
    return Response(msgspec.json.encode(content), media_type="application/json")
