"""One server for each module, and a look at its health after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chaos.harness import Server, started


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with started() as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    yield shared_server
    shared_server.assert_healthy()
