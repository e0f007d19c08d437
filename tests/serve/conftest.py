"""A checkpoint folder with a tokenizer and a template, and the app over the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "core" / "text")]

import fake_engine  # noqa: E402
from fake_parsers import PARSERS  # noqa: E402
from running import PATIENCE_S, started  # noqa: E402
from tokenizers_made import byte_level, save  # noqa: E402

from enginery.child_process import begin  # noqa: E402
from enginery.config.schema import EngineOptions  # noqa: E402
from enginery.plugin.registry import Registry  # noqa: E402
from enginery.serve.api.answer_parsers import NO_PARSERS, Parsers  # noqa: E402
from enginery.serve.api.served_model import ServedModel  # noqa: E402
from enginery.serve.api.service import Service  # noqa: E402
from enginery.serve.app import build_app  # noqa: E402
from enginery.serve.engine.client import EngineClient  # noqa: E402
from enginery.serve.engine.replica_options import replica_options  # noqa: E402
from enginery.serve.engine.replicas import Replicas  # noqa: E402
from enginery.text.text_side import TextSide  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% set told = tools %}"
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(byte_level(), tmp_path_factory.mktemp("checkpoint"), chat_template=TEMPLATE)
    (path / "config.json").write_text(json.dumps({"architectures": ["Fake"]}))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9, "eos_token_id": 1}))
    return path


class Live:
    """The app over a fake engine in a process of its own, and a client of it."""

    def __init__(self, service: Service, http: httpx.AsyncClient, log: Path) -> None:
        self.service = service
        self.http = http
        self._log = log

    @property
    def engine(self) -> EngineClient:
        """The one that is there now."""
        return self.service.engine.replicas[0].client

    async def post(self, path: str, **body: object) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def complete(self, prompt: object, **body: object) -> httpx.Response:
        return await self.post("/v1/completions", prompt=prompt, **body)

    async def chat(self, text: str, **body: object) -> httpx.Response:
        return await self.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], **body)

    async def named_events(self, path: str, **body: object) -> list[dict]:
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        found = []
        for block in filter(None, response.text.split("\n\n")):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found

    async def events(self, path: str, **body: object) -> list[dict]:
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def release(self) -> None:
        """Let requests with the seed HELD go on."""
        self._log.with_name("go").touch()

    def said(self, what: str) -> list[str]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [line.split()[1] for line in lines if line.startswith(what)]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.01)


@functools.cache
def without_plugins() -> Registry:
    return Registry.load(no_plugins=True)


@contextlib.asynccontextmanager
async def live(
    folder: Path, log: Path, *, parsers: Parsers = NO_PARSERS, restarts: int = 0, dp: int = 1, **options: object
) -> AsyncIterator[Live]:
    registry = without_plugins()
    asked = EngineOptions(model=str(folder), **options)
    start = functools.partial(EngineClient.start, manifest=registry.manifest, begin=functools.partial(begin, fake_engine.COMMAND))
    starts = [functools.partial(start, each, share=share) for each, share in replica_options(asked, dp, registry)]
    engine = await Replicas.start(*starts, restarts=restarts)
    loaded = asyncio.get_running_loop().create_future()
    text = TextSide.load(folder, chat_template=asked.chat_template)
    service = Service(engine=engine, loaded=loaded)
    engine.is_back = service.renew
    try:
        facts = await engine.ready(registry.manifest.digest())
        loaded.set_result(ServedModel(facts=facts, text=text, parsers=parsers))
        transport = httpx.ASGITransport(app=build_app(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield Live(service, http, log)
    finally:
        text.template.close()
        await engine.stop()


@pytest.fixture
def with_server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs an async function with a `Live`."""
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.setenv("FAKE_GO", str(log.with_name("go")))

    def run(scenario: Callable[[Live], Awaitable[None]], *, parsers: Parsers = NO_PARSERS, **options: object) -> None:
        async def main() -> None:
            async with asyncio.timeout(150), live(folder, log, parsers=parsers, **options) as server:
                await scenario(server)

        asyncio.run(main())

    return run


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the fake engine, which lets requests with the seed HELD go on when there is a file `go` beside it."""
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_GO", str(tmp_path / "go"))
    (tmp_path / "log").touch()
    return tmp_path / "log"


@pytest.fixture(scope="module")
def shared_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., httpx.Response]]:
    """Posts to one app that lives as long as the module's tests."""
    with posting(folder, tmp_path_factory.mktemp("log") / "log") as post:
        yield post


@pytest.fixture(scope="module")
def server_with_parsers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., httpx.Response]]:
    """The same with the parsers of `fake_parsers`."""
    with posting(folder, tmp_path_factory.mktemp("log") / "log", parsers=PARSERS) as post:
        yield post


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """Of a whole server, with the parsers of `fake_parsers`."""
    with started(folder) as (_, address):
        yield address


@contextlib.contextmanager
def posting(folder: Path, log: Path, *, parsers: Parsers = NO_PARSERS) -> Iterator[Callable[..., httpx.Response]]:
    with asyncio.Runner() as runner:
        context = live(folder, log, parsers=parsers)
        server = runner.run(context.__aenter__())

        def post(path: str, body: dict | bytes) -> httpx.Response:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return runner.run(server.http.post(path, content=content))

        yield post
        runner.run(context.__aexit__(None, None, None))
