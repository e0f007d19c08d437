"""The page and its headers. It asks the server that it comes from, and nobody else."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Final

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

PAGE: Final = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def content_security_policy(page: str) -> str:
    """Allows the one script and the one style sheet that stand in `page`, by their hashes, and requests to its own server."""
    allowed = {"default": "'none'", "connect": "'self'", "img": "data:"}
    for kind in ("script", "style"):
        (inside,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        allowed[kind] = f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
    sources = [f"{name}-src {value}" for name, value in allowed.items()]
    rest = ["base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"]
    return "; ".join(sources + rest)


HEADERS: Final = {
    "Content-Security-Policy": content_security_policy(PAGE),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_page(router: APIRouter) -> None:
    """The same for everybody, with nothing in it that needs a key."""

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE, headers=HEADERS)
