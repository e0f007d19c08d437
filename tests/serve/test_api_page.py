"""docs/api.md lists what the schemas have, and marks what is nobody else's."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest
from openai.resources.chat.completions import Completions as Chat
from openai.resources.completions import Completions
from openai.resources.responses import Responses

DOCS = Path(__file__).parents[2] / "docs"
OF_THE_CLIENT = {"extra_headers", "extra_query", "extra_body", "timeout", "self"}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_api_page", DOCS / "make_api_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(script):
    assert script.page() == (DOCS / "api.md").read_text(), "run: python docs/make_api_page.py > docs/api.md"


@pytest.mark.parametrize(
    ("path", "create"),
    [("/v1/completions", Completions.create), ("/v1/chat/completions", Chat.create), ("/v1/responses", Responses.create)],
)
def test_a_field_that_the_official_client_does_not_have_is_marked(script, path, create):
    fields = set(script.ENDPOINTS[path][1].__struct_fields__)
    official = set(inspect.signature(create).parameters) - OF_THE_CLIENT
    unmarked = fields - official - script.EXTENSIONS[path] - script.NO_EFFECT
    assert not unmarked
    assert not official & script.EXTENSIONS[path]
    assert script.EXTENSIONS[path] <= fields


@pytest.mark.parametrize(
    ("path", "create"),
    [("/v1/completions", Completions.create), ("/v1/chat/completions", Chat.create), ("/v1/responses", Responses.create)],
)
def test_what_the_official_client_can_send_is_implemented_or_refused_by_name(shared_server, script, path, create):
    own = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}.get(
        path, {"messages": [{"role": "user", "content": "x"}]}
    )
    official = set(inspect.signature(create).parameters) - OF_THE_CLIENT
    for name in official - set(script.ENDPOINTS[path][1].__struct_fields__):
        response = shared_server(path, own | {name: "x"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
        assert shared_server(path, own | {name: None}).status_code == 200
