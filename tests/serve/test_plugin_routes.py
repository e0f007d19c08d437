"""A plugin's route that raises is told apart from a fault of the server, in the answer and in the log."""

import asyncio
import logging
import sys
from concurrent.futures import Future
from unittest.mock import MagicMock

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from enginery.errors import RequestError
from enginery.plugin.records import PluginRecord, Status
from enginery.serve.api.service import Service
from enginery.serve.app import build_app, owners_of

PLUGIN = PluginRecord(name="page", distribution="some-page", version="1.0", status=Status.LOADED)


@pytest.fixture
def app() -> FastAPI:
    of_plugin, routes = APIRouter(), APIRouter()

    @of_plugin.get("/wrong")
    async def wrong() -> dict:
        raise RequestError("there is no such chat", param="chat")

    @of_plugin.get("/broken")
    @of_plugin.get("/broken/{item}")
    def broken() -> dict:
        return {}["absent"]

    @of_plugin.get("/leaves")
    async def leaves() -> dict:
        sys.exit(3)

    @of_plugin.get("/leaves-on-a-thread")
    def leaves_there() -> dict:
        sys.exit(3)

    @routes.get("/ours")
    async def ours() -> dict:
        raise ZeroDivisionError

    routes.include_router(of_plugin)
    return build_app(Service(engine=MagicMock(), loaded=Future()), plugin_routes=routes, owners=owners_of([(PLUGIN, of_plugin)]))


def get(app: FastAPI, path: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.get(path)

    return asyncio.run(ask())


@pytest.mark.parametrize("path", ["/broken", "/broken/3"])
def test_what_a_plugins_route_raises_names_the_plugin(app, path, caplog):
    with caplog.at_level(logging.ERROR, logger="enginery.serve.app"):
        answer = get(app, path)
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "KeyError, a bug of plugin page (some-page==1.0); the log has the traceback",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith(f"GET {path} failed in a route of plugin page (some-page==1.0): KeyError: 'absent' ({__file__}, line ")
    assert record.exc_info is not None


@pytest.mark.parametrize("path", ["/leaves", "/leaves-on-a-thread"])
def test_a_plugins_route_that_exits_ends_the_request_and_not_the_server(app, path, caplog):
    with caplog.at_level(logging.ERROR, logger="enginery.serve.app"):
        answer = get(app, path)
    assert answer.status_code == 500
    assert "a bug of plugin page (some-page==1.0)" in answer.json()["error"]["message"]
    assert "RuntimeError: SystemExit: 3" in caplog.records[0].getMessage()


def test_what_the_servers_own_code_raises_names_no_plugin(app, caplog):
    with caplog.at_level(logging.ERROR, logger="enginery.serve.app"):
        answer = get(app, "/ours")
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        500,
        "ZeroDivisionError, a bug of the server; the log has the traceback",
    )
    assert [record.getMessage() for record in caplog.records] == ["GET /ours failed"]


def test_a_plugins_route_may_refuse_a_request(app, caplog):
    answer = get(app, "/wrong")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat")
    assert not caplog.records
