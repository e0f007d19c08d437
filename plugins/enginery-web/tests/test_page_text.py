"""What can be said of the page without a browser."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient

from enginery_web import register_routes
from enginery_web.page import PAGE, content_security_policy


@pytest.fixture(scope="module")
def client() -> TestClient:
    app, routes = FastAPI(), APIRouter()
    register_routes(routes, None)
    app.include_router(routes)
    return TestClient(app)


@pytest.fixture(scope="module")
def answer(client: TestClient):
    return client.get("/")


def test_its_head_can_be_asked_for(client: TestClient) -> None:
    head = client.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert "content-security-policy" in head.headers


def test_the_page_is_one_small_file_that_loads_nothing(answer) -> None:
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == PAGE
    assert len(answer.content) < 60_000
    assert set(re.findall(r"https?://[^\"'\s]+", PAGE)) == {"http://www.w3.org/2000/svg"}
    assert re.findall(r"\b(?:src|href|action)=\"([^\"]*)\"", PAGE) == ["data:,"]
    assert "@import" not in PAGE
    assert "url(" not in PAGE


def test_the_policy_allows_this_script_and_this_style_and_no_other(answer) -> None:
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    for kind in ("script", "style"):
        inside = PAGE.partition(f"<{kind}>")[2].partition(f"</{kind}>")[0]
        assert policy[f"{kind}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy)
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_second_script_cannot_slip_in() -> None:
    with pytest.raises(ValueError, match="too many values"):
        content_security_policy(PAGE.replace("</body>", "<script>1</script></body>"))


def test_nothing_is_made_html_and_nothing_is_handled_inline() -> None:
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "DOMParser",
        "javascript:",
    ):
        assert word not in PAGE
    assert re.findall(r"<[^>]*\s(?:on\w+|style)=", PAGE.partition("<script>")[0]) == []
