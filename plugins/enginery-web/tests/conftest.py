"""A server whose answers tests decide, and Chromium with its page open."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import shutil
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from enginery_web import register_routes

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
METRICS = """
# HELP vllm:generation_tokens_total Tokens generated.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{model_name="m"} GENERATED
vllm:prompt_tokens_total{model_name="m"} 50.0
vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_waiting{model_name="m"} 7.0
vllm:kv_cache_usage_perc{model_name="m"} 0.425
vllm:prefix_cache_queries_total{model_name="m"} GENERATED
vllm:prefix_cache_hits_total{model_name="m"} 0.0
vllm:spec_decode_num_drafts_total{model_name="m"} GENERATED
enginery:spec_decode_told_tokens_total{model_name="m"} GENERATED_AND_HALF
vllm:time_to_first_token_seconds_bucket{le="0.01",model_name="m"} 0.0
vllm:time_to_first_token_seconds_bucket{le="0.03",model_name="m"} GENERATED
vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} GENERATED
"""
INFO = {
    "engine": {
        "attn_backend": "fa",
        "num_pages": 64,
        "page_size": 16,
        "decisions": [{"setting": "attention", "value": "fa", "reason": "highest priority <b>of all</b>"}],
    },
    "plugins": [{"name": "attn-fa", "distribution": "fa-dist", "version": "1.2"}],
}


async def released(holder: threading.Semaphore) -> None:
    while not holder.acquire(blocking=False):
        await asyncio.sleep(0.01)


class Fake:
    """An OpenAI-compatible server as far as the page needs one. Each piece waits for `go`, each answer of /metrics for `look`."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.state = "ready"
        self.models = ["m"]
        self.metrics: str | None = METRICS
        self.info: dict | None = INFO
        self.generated = 0
        self.deltas: list[dict] = [{"content": "Hello"}, {"content": " world"}]
        self.end: list[object] = [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, "[DONE]"]
        self.refusal: tuple[int, dict] | None = None
        self.go = threading.Semaphore(1000)
        self.look = threading.Semaphore(1000)
        self.asked: list[dict] = []
        self.hung_up = threading.Event()
        self.url = ""
        self.app = FastAPI()
        self._add_routes()

    async def stream(self) -> AsyncIterator[str]:
        try:
            for delta in self.deltas:
                await released(self.go)
                yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': None}]})}\n\n"
            for event in self.end:
                yield f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"
        except asyncio.CancelledError:
            self.hung_up.set()
            raise

    def _add_routes(self) -> None:
        app, routes = self.app, APIRouter()

        @app.middleware("http")
        async def guard(request: Request, answer):
            is_public = request.url.path == "/" or request.url.path.startswith("/assets/")
            if self.key and not is_public and request.headers.get("authorization") != f"Bearer {self.key}":
                return JSONResponse({"error": {"message": "this server needs a key that it knows"}}, status_code=401)
            return await answer(request)

        @app.get("/health")
        async def health():
            return JSONResponse({"status": self.state}, status_code=200 if self.state == "ready" else 503)

        @app.get("/v1/models")
        async def models():
            return {"data": [{"id": name} for name in self.models]}

        @app.get("/metrics")
        async def metrics():
            await released(self.look)
            self.generated += 100
            half = str(self.generated + self.generated // 2)
            found = self.metrics and self.metrics.replace("GENERATED_AND_HALF", half).replace("GENERATED", str(self.generated))
            return PlainTextResponse(found) if found else PlainTextResponse("", status_code=404)

        @app.get("/server_info")
        async def info():
            return self.info if self.info is not None else JSONResponse({}, status_code=404)

        @app.post("/v1/chat/completions")
        async def chat(request: Request):
            self.asked.append(await request.json())
            if self.refusal:
                return JSONResponse(self.refusal[1], status_code=self.refusal[0])
            return StreamingResponse(self.stream(), media_type="text/event-stream")

        register_routes(routes, None)
        app.include_router(routes)


class _Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        pass


class Port:
    """Where the fake servers of a module are, one after the other: an origin of its own costs a tab a process of its own."""

    def __init__(self) -> None:
        self.fake = Fake()
        config = uvicorn.Config(
            self._answer, interface="asgi3", port=0, log_level="critical", ws="none", timeout_graceful_shutdown=1
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            threading.Event().wait(0.01)
        self._url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    async def _answer(self, scope, receive, send) -> None:
        await self.fake.app(scope, receive, send)

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def put(self, fake: Fake) -> None:
        self.fake, fake.url, fake.stop = fake, self._url, self.stop

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="module")
def ports() -> Iterator[list[Port]]:
    """Those that were opened, the newest last."""
    found: list[Port] = []
    yield found
    for port in found:
        port.stop()


@pytest.fixture
def fake(ports: list[Port]) -> Iterator[Fake]:
    if not ports or not ports[-1].is_open:
        ports.append(Port())
    fake = Fake()
    ports[-1].put(fake)
    yield fake
    fake.go.release(1000)
    fake.look.release(1000)


@pytest.fixture(scope="session")
def started_browser():
    """Chromium, and the event loop that playwright runs beside the tests. Where REQUIRE_BROWSER is set it must be there; elsewhere
    its tests are skipped without it."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not os.environ.get("REQUIRE_BROWSER"):
        pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
        if found is None:
            pytest.skip(f"none of {', '.join(BROWSERS)} is installed; apt-get install chromium")
    playwright = importlib.import_module("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        loop = asyncio.get_running_loop()
        asyncio._set_running_loop(None)
        yield opened, loop
        asyncio._set_running_loop(loop)
        opened.close()


@pytest.fixture(scope="module")
def browser(started_browser):
    """That browser. Its loop is told of only as long as a module's tests: those of other files run loops of their own."""
    opened, loop = started_browser
    asyncio._set_running_loop(loop)
    yield opened
    asyncio._set_running_loop(None)


@pytest.fixture(scope="module")
def window(browser):
    """The one tab of a module's tests, with English texts."""
    context = browser.new_context(locale="en-US")
    context.set_default_timeout(30_000)
    page = context.new_page()
    page.complaints = complaints = []
    context.on("weberror", lambda error: complaints.append(str(error.error)))
    context.on("console", lambda said: said.type == "error" and "status of" not in said.text and complaints.append(said.text))
    yield page
    context.close()


def leave(page) -> None:
    """Go to no page; one that tells of an error may still be on its way, and come between."""
    for _ in range(20):
        with contextlib.suppress(Exception):
            page.goto("about:blank")
            return
        page.wait_for_timeout(100)
    raise AssertionError("the tab cannot be left")


@pytest.fixture
def tab(window):
    """That tab, empty, as if it were new; whatever the page complains of fails the test."""
    window.complaints.clear()
    window.set_viewport_size({"width": 1280, "height": 800})
    window.emulate_media(color_scheme="light")
    yield window
    complaints = [text for text in window.complaints if "net::ERR_" not in text]
    for other in window.context.pages[1:]:
        other.close()
    window.context.clear_permissions()
    try:
        window.goto(window.evaluate("location.origin") + "/assets/nothing")
        window.evaluate("localStorage.clear(), sessionStorage.clear()")
    except Exception:  # the server is gone, and nobody will be at its address again
        leave(window)
    assert complaints == []


@pytest.fixture
def page(tab, fake):
    """The fake server's page, ready."""
    tab.goto(fake.url)
    tab.wait_for_selector("#state.good")
    return tab
